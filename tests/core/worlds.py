"""Jobs whose world changes, and the words for it."""

from __future__ import annotations

from typing import Any

from elastic_ft.core.commands import Command
from elastic_ft.core.events import WorkerLost
from elastic_ft.core.policy import Policy
from tests.core.script import Script

FOUR = {"a": "n1", "b": "n2", "c": "n3", "d": "n4"}


def script_of(min_workers: int, max_workers: int, **more: Any) -> Script:
    return Script(Policy(min_workers, max_workers, **more))


def pause_all(script: Script, step: int) -> list[Command]:
    """Every living member answers with its live state of ``step``."""
    commands: list[Command] = []
    before = {m.worker: rank for rank, m in enumerate(script.assignment.members)}
    for worker in script.state.ready:
        if worker in before:
            commands += script.paused(worker, script.live(worker, step))
        elif worker in script.state.benched:
            commands += script.paused(worker)
    return commands


def lose(script: Script, worker: str, step: int) -> list[Command]:
    script.tell(WorkerLost, worker, "killed")
    return pause_all(script, step)


def of(kind: type[Any], commands: list[Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]
