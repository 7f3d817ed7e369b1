"""Where the time before the first step went: of the worker that was ready last, in its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, WorkerId
from elastic_ft.core.state import State

PARTS = {
    "asked_s": "until workers were asked for",
    "process_s": "until its process was there",
    "imports_s": "to import",
    "connect_s": "to reach the controller",
    "data_s": "to open the data",
    "model_s": "to prepare the model",
    "forming_s": "until all trained",
    "first_step_s": "for the first step",
}
TOLD = ("connect_s", "data_s", "model_s")  # by the worker, as it is ready; and imports_s


class Startup:
    """Told every event after the core, until the first step is committed, or the job ends.

    Attributes:
        parts: seconds by PARTS, and ``worker``, whom they are of; {} before that. Where the job
            ends without a step, those that are known. Else together they are the time from the
            controller's start to that commit: what came before, a cluster's start or the checks of
            the command line, is in none of them. A process is "there" as its own code begins: what
            the host does until then (Ray: to place the actor, to start Python and Ray in it) is
            ``process_s``. What a fork server had imported before workers were asked for is in none
            of them either.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._asked_at_s: float | None = None
        self._ready: dict[WorkerId, tuple[float, ev.WorkerReady]] = {}
        self._first: Assignment | None = None  # the one that makes the first step
        self._formed_at_s = 0.0
        self._is_broken = False
        self.parts: dict[str, Any] = {}

    def on(self, now_s: float, event: ev.Event, state: State) -> bool:
        """Returns whether ``parts`` are known just now, and whose they are."""
        if self.parts:
            return False
        if self._asked_at_s is None:  # the first event begins the job, and asks for them
            self._asked_at_s = now_s
        if isinstance(event, ev.WorkerReady):
            self._ready.setdefault(event.member.worker, (now_s, event))
        is_done = self._first is not None and state.committed > self._first.source.step
        if not is_done and state.phase != "ended":
            self._look_at_phase(now_s, state)
            return False
        found = {"asked_s": max(0.0, self._asked_at_s - self._started_at_s)}
        first = self._first if is_done or not self._is_broken else None
        last = self._last_ready(first)
        if last is not None:
            ready_s, event = last
            found |= self._until_ready(ready_s, event, self._asked_at_s)
            if first is not None:
                found["forming_s"] = max(0.0, self._formed_at_s - ready_s)
            if is_done:
                found["first_step_s"] = max(0.0, now_s - self._formed_at_s)
        rounded = {name: round(seconds, 3) for name, seconds in found.items()}
        self.parts = rounded if last is None else {"worker": last[1].member.worker, **rounded}
        return last is not None

    def _look_at_phase(self, now_s: float, state: State) -> None:
        """A pause that is planned lets the step go on; its commit may come while others form."""
        if state.phase != "running":
            self._is_broken |= state.abort
        elif self._first is None or self._is_broken:
            self._first, self._formed_at_s, self._is_broken = state.assignment, now_s, False

    def _last_ready(self, first: Assignment | None) -> tuple[float, ev.WorkerReady] | None:
        """Of those that trained first, or of all where none did; and when it was."""
        workers = [m.worker for m in first.members] if first is not None else [*self._ready]
        ready = [self._ready[worker] for worker in workers if worker in self._ready]
        return max(ready, key=lambda pair: pair[0], default=None)

    def _until_ready(
        self, ready_s: float, last: ev.WorkerReady, asked_at_s: float
    ) -> dict[str, float]:
        """By the worker's own stopwatch, backwards: its clock may be another."""
        told = {name: last.spent.get(name, 0.0) for name in TOLD}
        imported_s = max(0.0, ready_s - asked_at_s - sum(told.values()))
        imports_s = min(last.spent.get("imports_s", 0.0), imported_s)
        return {"process_s": imported_s - imports_s, "imports_s": imports_s, **told}

    @property
    def reason(self) -> str:
        end = "" if "first_step_s" in self.parts else "; no step is committed"
        return f"the last one ready, {self.parts['worker']}: {', '.join(self._told())}{end}"

    def _told(self) -> Iterator[str]:
        told = ((self.parts.get(name), what) for name, what in PARTS.items())
        rounded = ((f"{seconds or 0.0:.1f}", what) for seconds, what in told)
        return (f"{seconds} s {what}" for seconds, what in rounded if seconds != "0.0")
