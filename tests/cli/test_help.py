"""What ``--help`` says is all that was written: Rich takes ``[words]`` for markup, and drops it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from elastic_ft.cli.app import app


def _texts(command: Any, name: str = "elastic-ft") -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for under, other in getattr(command, "commands", {}).items():
        yield from _texts(other, f"{name} {under}")


def test_help_loses_nothing() -> None:
    texts = list(_texts(typer.main.get_command(app)))
    assert len(texts) > 100
    assert [t for t in texts if Text.from_markup(t[1]).plain != t[1] or " ." in t[1]] == []
