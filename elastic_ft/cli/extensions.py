"""Packages that add to the command line by entry points: what breaks runs on purpose is one.

``elastic_ft.commands``: a typer app, by the name of its command. ``elastic_ft.faults``: a module
that has what ``chaos.extension`` has.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

import typer

from elastic_ft.errors import ConfigError


def add_commands(app: typer.Typer) -> None:
    for entry in entry_points(group="elastic_ft.commands"):
        app.add_typer(entry.load(), name=entry.name)


@cache
def faults() -> Any:
    """Raises ConfigError where no package offers it."""
    found = [entry.load() for entry in entry_points(group="elastic_ft.faults")]
    if not found:
        raise ConfigError("no package that injects faults is installed (elastic_ft's own: chaos)")
    return found[0]
