"""Who stood where when a generation broke: asked before anything is killed, one journal line.

Survivors tell their stacks as they are fenced; who hangs is asked, and so is its node's keeper.
Nobody waits for the answers but the killing of who hangs, and that for ``KILL_WAIT_S`` at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER, Member, WorkerId
from elastic_ft.core.hangs import Mark
from elastic_ft.core.state import State
from elastic_ft.transport.control import Inspect, Stood
from elastic_ft.transport.stacks import collective_in, own_code_in

KILL_WAIT_S = 0.2
LINE_WAIT_S = 1.0
STACKS_MAX = 32
Write = Callable[[str, int, str, dict[str, Any]], object]


@dataclass(slots=True)
class Inquiry:
    """One broken generation. Times are of the monotonic clock.

    ``told``: whether it is worth a line. Whose source was refused broke for that: no matter where
    anybody stood, and a store that is away may be tried for long.
    """

    generation: int
    cause: str
    due_s: float
    entries: dict[WorkerId, dict[str, Any]]
    awaited: set[WorkerId]
    told: bool
    frames: dict[WorkerId, tuple[str, ...]] = field(default_factory=dict)


class Inquiries:
    """Args:
    send: to a worker or keeper; False if it can't be reached.
    kill: what is held back until who hangs has been looked at.
    write: a line of the journal.
    """

    def __init__(
        self,
        send: Callable[[WorkerId, Any], bool],
        kill: Callable[[WorkerId], object],
        write: Write,
    ) -> None:
        self._send, self._kill, self._write = send, kill, write
        self._points: dict[WorkerId, str] = {}  # the last that each told of
        self._asked: dict[WorkerId, float] = {}  # until when its killing may wait
        self._held: set[WorkerId] = set()
        self._early: list[Stood] = []  # before the inquiry was opened
        self._open: Inquiry | None = None

    @property
    def due_s(self) -> float | None:
        """When ``look`` has something to do, whatever comes."""
        times = [self._asked[worker] for worker in self._held]
        return min([*times, *([self._open.due_s] if self._open else [])], default=None)

    def reached(self, worker: WorkerId, point: str) -> None:
        self._points[worker] = point

    # ------------------------------------------------------------------------ asking

    def ask(self, members: Iterable[Member]) -> None:
        """Asks who hangs, and the keepers that can see it."""
        until_s = time.monotonic() + KILL_WAIT_S
        for member in members:
            question = Inspect(member.worker, member.pid)
            asked = [self._send(to, question) for to in (member.worker, KEEPER + member.node)]
            if any(asked):
                self._asked[member.worker] = until_s

    def kill(self, worker: WorkerId) -> None:
        """At once, or when the worker has been looked at."""
        if worker in self._asked and time.monotonic() < self._asked[worker]:
            self._held.add(worker)
        else:
            self._kill(worker)

    def broke(self, before: State, after: State, event: ev.Event, marks: dict[str, Mark]) -> None:
        """A generation is fenced because of ``event``."""
        self._close()
        now_s = time.monotonic()
        suspects = {*self._asked, *_lost(event, before)}
        entries: dict[WorkerId, dict[str, Any]] = {}
        for worker, rank in sorted(before.ranks.items(), key=lambda pair: pair[1]):
            member = before.ready.get(worker)
            if member is None:
                continue
            entries[worker] = {"worker": worker, "rank": rank, "node": member.node}
            entries[worker] |= {"suspect": worker in suspects, "pid": member.pid}
            entries[worker] |= {"step": before.committed, "point": ""}
            if mark := marks.get(worker):
                entries[worker] |= {
                    "step": mark.step or before.committed,  # 0: nothing heard since it formed
                    "point": self._points.get(worker, ""),
                    "still_s": round(now_s - mark.moved_at_s, 3),
                }
        awaited = {worker for worker in entries if worker in after.ready or worker in self._asked}
        cause, told = type(event).__name__, not isinstance(event, ev.SourceRefused)
        due_s = now_s + LINE_WAIT_S
        self._open = Inquiry(before.generation, cause, due_s, entries, awaited, told)
        for early in self._early:
            self.answer(early)
        self._early.clear()

    def lost(self, worker: WorkerId) -> None:
        """Its peers may have told of the broken group before its own end was known."""
        inquiry = self._open
        if inquiry is not None and worker in inquiry.entries:
            inquiry.entries[worker]["suspect"] = True
            inquiry.awaited.discard(worker)
            if not inquiry.awaited:
                self._close()

    # ----------------------------------------------------------------------- answers

    def answer(self, stood: Stood) -> None:
        inquiry = self._open
        if inquiry is None:
            self._early = [*self._early, stood][-STACKS_MAX:]
            return
        entry = inquiry.entries.get(stood.worker)
        if entry is None:
            return
        if stood.by == "worker":
            entry |= {"step": stood.step, "point": stood.point}
        if stood.process:
            entry["process"] = stood.process
        if stood.frames and stood.worker not in inquiry.frames:
            inquiry.frames[stood.worker] = stood.frames
            entry["collective"] = collective_in(stood.frames)
            entry["own_code"] = own_code_in(stood.frames)
        if stood.frames or stood.last:
            inquiry.awaited.discard(stood.worker)
            self._release(stood.worker)
        if not inquiry.awaited:
            self._close()

    def look(self) -> None:
        """Ends what has waited long enough."""
        now_s = time.monotonic()
        for worker in [worker for worker in self._held if now_s >= self._asked[worker]]:
            self._release(worker)
        if self._open is not None and now_s >= self._open.due_s:
            self._close()

    def _release(self, worker: WorkerId) -> None:
        if worker in self._held:
            self._held.remove(worker)
            self._kill(worker)
        if worker in self._asked:
            self._asked[worker] = 0.0

    def _close(self) -> None:
        inquiry, self._open = self._open, None
        self._asked = {worker: s for worker, s in self._asked.items() if worker in self._held}
        if inquiry is None or not inquiry.told:
            return
        stacks: dict[tuple[str, ...], str] = {}
        for worker, frames in inquiry.frames.items():
            if frames in stacks or len(stacks) < STACKS_MAX:
                inquiry.entries[worker]["stack"] = stacks.setdefault(frames, f"s{len(stacks)}")
        entries = list(inquiry.entries.values())
        fields = {
            "cause": inquiry.cause,
            "workers": entries,
            "stacks": {name: list(frames) for frames, name in stacks.items()},
        }
        self._write("diagnosis", inquiry.generation, in_words(entries), fields)


def _lost(event: ev.Event, before: State) -> set[WorkerId]:
    """Whom an event accuses."""
    if isinstance(event, (ev.WorkerLost, ev.WorkerHung, ev.WorkerRaised)):
        return {event.worker}
    if isinstance(event, ev.NodeLost):
        return {m.worker for m in before.ready.values() if m.node == event.node}
    return set()


def in_words(entries: list[dict[str, Any]]) -> str:
    """Suspects first, each by itself; the others by where they stood."""
    parts = [_of_suspect(entry) for entry in entries if entry["suspect"]]
    places: dict[str, list[str]] = {}
    for entry in entries:
        if not entry["suspect"]:
            places.setdefault(_place(entry), []).append(str(entry["rank"]))
    for place, ranks in places.items():
        parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {place}")
    return "; ".join(parts) or "no worker has told where it stood"


def _of_suspect(entry: dict[str, Any]) -> str:
    text = f"{entry['worker']} (rank {entry['rank']}, {entry['node'][:12]}) {_place(entry)}"
    if state := entry.get("process", {}).get("State"):
        text += f", process {state}"
    if "still_s" in entry:
        text += f", last moved {entry['still_s']:.1f} s ago"
    return text


def _place(entry: dict[str, Any]) -> str:
    place = f"at {entry['point'] or 'the beginning'} of step {entry['step']}"
    inside = entry.get("collective") or entry.get("own_code")
    return f"{place}, in {inside}" if inside else place
