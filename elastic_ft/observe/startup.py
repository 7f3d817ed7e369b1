"""Where the time before the first step went: of the worker that was ready last, in its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.core.state import State

PARTS = {
    "process_s": "until its process was there",
    "imports_s": "to import and reach the controller",
    "data_s": "to open the data",
    "model_s": "to prepare the model",
    "forming_s": "until all trained",
}


class Startup:
    """Told every event after the core, until the first generation trains.

    Attributes:
        parts: seconds by PARTS, and ``worker``, whom they are of; {} before that. Together the
            seconds are the time from the controller's start: what came before, a cluster's start or
            the checks of the command line, is in none of them.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._ready: dict[ev.WorkerId, tuple[float, ev.WorkerReady]] = {}
        self.parts: dict[str, Any] = {}

    def on(self, now_s: float, event: ev.Event, state: State) -> bool:
        """Returns whether ``parts`` are known just now."""
        if self.parts:
            return False
        if isinstance(event, ev.WorkerReady):
            self._ready.setdefault(event.member.worker, (now_s, event))
        if state.phase != "running" or state.assignment is None:
            return False
        members = {member.worker for member in state.assignment.members}
        ready = [self._ready[worker] for worker in members if worker in self._ready]
        if not ready:
            return False
        ready_s, last = max(ready, key=lambda pair: pair[0])
        prepared = {name: last.spent.get(name, 0.0) for name in ("data_s", "model_s")}
        process_s = max(0.0, (last.started_at_s or ready_s) - self._started_at_s)
        whole_s = max(0.0, ready_s - self._started_at_s)
        imports_s = max(0.0, whole_s - process_s - sum(prepared.values()))
        found = {"process_s": process_s, "imports_s": imports_s, **prepared}
        found["forming_s"] = max(0.0, now_s - ready_s)
        rounded = {name: round(seconds, 3) for name, seconds in found.items()}
        self.parts = {"worker": last.member.worker, **rounded}
        return True

    @property
    def reason(self) -> str:
        return f"the last one ready, {self.parts['worker']}: {', '.join(self._told())}"

    def _told(self) -> Iterator[str]:
        return (f"{self.parts[name]:.1f} s {what}" for name, what in PARTS.items())
