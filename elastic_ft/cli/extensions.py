"""Packages that add to the command line by entry points: what breaks runs on purpose is one.

``elastic_ft.commands``: a typer app, by the name of its command. ``elastic_ft.faults``: a module
that has what ``chaos.extension`` has.
"""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import typer

from elastic_ft.errors import ConfigError, one_line

FAULTS = "elastic_ft.faults"


def add_commands(app: typer.Typer) -> None:
    """One that can't be imported is left out, with a line: the others are of use without it."""
    for entry in entry_points(group="elastic_ft.commands"):
        try:
            app.add_typer(entry.load(), name=entry.name)
        except Exception as error:
            print(
                f"elastic-ft: no command {entry.name} ({entry.value}): {one_line(error)}",
                file=sys.stderr,
            )


@cache
def faults() -> Any:
    """Raises ConfigError unless one package offers it."""
    entries = list(entry_points(group=FAULTS))
    if len(entries) != 1:
        found = ", ".join(entry.value for entry in entries) or "none"
        raise ConfigError(f"one package is to inject faults, found {found}: install it anew")
    try:
        return entries[0].load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{entries[0].value}, which injects faults: {why}") from error


class Undisturbed:
    """What ``disturbed`` makes, where nothing is to happen to a run."""

    inside: tuple[Any, ...] = ()
    in_foreground = False  # of plain processes: it is done to the host, in the controller's process

    def local_cluster(self, nodes: int, cpus_per_node: int) -> Any:
        from elastic_ft.hosts.ray.cluster import LocalCluster

        return LocalCluster(nodes, cpus_per_node)

    def injected(self, cluster: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def unfired(self, result: dict[str, Any]) -> list[str]:
        return []


def disturbed(armed: Any, out: str, checkpoint_url: str, resumed: bool) -> Any:
    """A context manager, to be entered before anything of the run is started.

    ``armed``: a scenario, or None. Raises ConfigError."""
    if armed is None:
        return contextlib.nullcontext(Undisturbed())
    return faults().disturbed(armed, out, checkpoint_url, resumed)
