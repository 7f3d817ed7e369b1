"""Goodput: which seconds went where, of the job's wall clock and of every allocated worker.

Both are followed from what the core is told and what it answers, so that they can be computed
again from a run folder's inbox.jsonl (``observe.replay``). No clock is read here.

A worker is allocated from its process's start until it is lost, released, or the job ends. Every
second of that is in exactly one class:

    productive_step                       steps that are committed, or may still be
    wasted_progress_from_disruption       steps, and parts of steps, that are run again
    noticing                              of a broken step: until anyone knew
    fencing                               breaking off, until the worker is at its safe point
    forming                               groups and the module of a new generation
    resharding                            its state from other workers and keepers
    unproductive_checkpoint_restore_time  its state from a checkpoint
    unproductive_checkpoint_save_time     the training thread waits for snapshots and uploads
    data_loading_sync                     the training thread waits for data
    program_startup                       processes, imports, the first generation's state
    suspended                             too few workers to train
    idle                                  no member of the running world
    shutdown                              done, while others are not

Names of Google's ml-goodput library where it has one (there: BadputType, in upper case).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Member, Tier, WorkerId
from elastic_ft.core.state import State
from elastic_ft.observe.node_accounts import NodeAccounts

PRODUCTIVE, WASTED = "productive_step", "wasted_progress_from_disruption"
NOTICING, FENCING, FORMING, RESHARDING = "noticing", "fencing", "forming", "resharding"
RESTORE = "unproductive_checkpoint_restore_time"
SAVE, DATA = "unproductive_checkpoint_save_time", "data_loading_sync"
STARTUP, SUSPENDED, IDLE, SHUTDOWN = "program_startup", "suspended", "idle", "shutdown"
CLASSES = (
    *(PRODUCTIVE, WASTED, NOTICING, FENCING, FORMING, RESHARDING, RESTORE, SAVE, DATA),
    *(STARTUP, SUSPENDED, IDLE, SHUTDOWN),
)
TRAINING = "training"  # no class: what a step was good for shows later
STEPS_KEPT = 100_000  # committed ones that could still be rolled back
STEPS_TOLD = 256  # of those, to the next controller


@dataclass(frozen=True, slots=True)
class Totals:
    """Attributes:
    wall_s: of the job.
    goodput: fraction of the wall clock in running generations.
    badput: cause -> seconds of the wall clock; with goodput they are the whole.
    classes: class -> worker-seconds; together they are ``allocated_s``.
    allocated_s: worker-seconds from each process's start to its end.
    available_s: worker-seconds that the nodes offered, up to max_workers.
    """

    wall_s: float
    goodput: float
    badput: dict[str, float]
    classes: dict[str, float]
    allocated_s: float
    available_s: float

    def as_dict(self) -> dict[str, Any]:
        """As it stands in result.json under ``worker_seconds``."""
        productive = self.classes[PRODUCTIVE]
        return {
            "classes": {name: round(s, 4) for name, s in self.classes.items()},
            "allocated_s": round(self.allocated_s, 4),
            "available_s": round(self.available_s, 4),
            "goodput_per_allocated": round(productive / max(1e-9, self.allocated_s), 6),
            "goodput_per_available": round(productive / max(1e-9, self.available_s), 6),
        }


class Accounts:
    """Told every event after the core: ``on(now_s, event, commands, state)``.

    ``now_s`` is the controller's clock throughout, for clocks of other machines differ.
    """

    def __init__(self, started_at_s: float, workers_per_node: int, max_workers: int) -> None:
        self._wall = WallClock(started_at_s)
        self._workers = WorkerSeconds(started_at_s)
        self._nodes = NodeAccounts(started_at_s, workers_per_node, max_workers)

    def on(
        self, now_s: float, event: ev.Event, commands: Iterable[cmd.Command], state: State
    ) -> None:
        self._wall.on(now_s, state)
        self._workers.on(now_s, event, commands, state)
        self._nodes.on(now_s, event, state, self._workers.count)

    def as_json(self) -> dict[str, Any]:
        """For ``go_on``. Of the committed steps, the last ones."""
        return {
            "wall": self._wall.as_json(),
            "workers": self._workers.as_json(),
            "nodes": self._nodes.as_json(),
        }

    def go_on(self, values: dict[str, Any], state: State) -> None:
        """As the accounts were that gave ``values``, when the core was in ``state``. Raises
        KeyError, TypeError, ValueError."""
        self._wall.go_on(values["wall"])
        self._workers.go_on(values["workers"], state)
        self._nodes.go_on(values["nodes"])

    @property
    def nodes(self) -> int:
        """With a worker or a keeper that is alive."""
        return len(self._nodes.there)

    def totals(self, now_s: float) -> Totals:
        """As of ``now_s``; nothing is changed."""
        wall_s, goodput, badput = self._wall.totals(now_s)
        allocated_s = self._workers.allocated_s(now_s)
        return Totals(
            wall_s=wall_s,
            goodput=goodput,
            badput=badput,
            classes=self._workers.totals(now_s),
            allocated_s=allocated_s,
            available_s=max(self._nodes.available_s(now_s), allocated_s),
        )


# ------------------------------------------------------------------- the job's wall clock


class WallClock:
    """The time between changes of the job's phase.

    ``running`` is productive; everything else goes to its cause: "startup" until the first
    generation trains, "suspended", or "recovery:<cause>".
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_s = self._since_s = started_at_s
        self._phase, self._cause = "starting", "startup"
        self._seconds: dict[str, float] = {}

    def on(self, now_s: float, state: State) -> None:
        if state.phase == self._phase:
            return
        self._seconds = self._booked(now_s)
        self._since_s, self._phase = max(now_s, self._since_s), state.phase
        if state.phase == "running":
            self._cause = ""
        elif state.phase == "suspended":
            self._cause = "suspended"
        elif state.phase in ("pausing", "forming") and state.episode is not None:
            self._cause = f"recovery:{state.episode.cause}"
        elif state.phase == "ended":
            self._cause = "shutdown"

    def as_json(self) -> list[Any]:
        return [self._started_s, self._since_s, self._phase, self._cause, self._seconds]

    def go_on(self, values: list[Any]) -> None:
        self._started_s, self._since_s, self._phase, self._cause, seconds = values
        self._seconds = dict(seconds)

    def _booked(self, now_s: float) -> dict[str, float]:
        spent = max(0.0, now_s - self._since_s)
        return {**self._seconds, self._cause: self._seconds.get(self._cause, 0.0) + spent}

    def totals(self, now_s: float) -> tuple[float, float, dict[str, float]]:
        seconds, wall_s = self._booked(now_s), max(1e-9, now_s - self._started_s)
        badput = {cause: round(s, 4) for cause, s in sorted(seconds.items()) if cause}
        return round(wall_s, 4), round(seconds.get("", 0.0) / wall_s, 6), badput


# --------------------------------------------------------------------- every worker's time


@dataclass(slots=True)
class SeatAccount:
    """One allocated worker. ``since_s``: up to there its time is booked; then it is in ``kind``."""

    started_s: float
    since_s: float
    kind: str


@dataclass(slots=True)
class WorkerSeconds:
    """Worker-seconds by class.

    What a step was good for shows later: its seconds wait in ``_open`` until it is committed or
    run again, those of a broken-off step in ``_broken`` until its recovery tells when it was
    noticed.
    """

    started_at_s: float
    _seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    _seats: dict[WorkerId, SeatAccount] = field(default_factory=dict)
    _ended_s: float = 0.0  # worker-seconds of those that are gone
    _open: dict[int, float] = field(default_factory=dict)  # by step
    _committed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    _broken: list[float] = field(default_factory=list)
    _shape: tuple[Any, ...] = ()
    _ready: Mapping[WorkerId, Member] | None = None
    _now_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self._seats)

    def on(
        self, now_s: float, event: ev.Event, commands: Iterable[cmd.Command], state: State
    ) -> None:
        if isinstance(event, ev.JobStarted):  # another controller: its workers are new ones
            for worker in list(self._seats):
                self._leave(worker, self._now_s)
        self._now_s = max(now_s, self._now_s)
        if isinstance(event, ev.WorkerReady) and event.member.worker not in self._seats:
            if event.member.worker in state.ready:
                self._arrive(event)
        elif isinstance(event, ev.StepApplied):
            self._applied(event)
        elif isinstance(event, ev.Resumed):
            self._resumed(event, state)
        elif isinstance(event, ev.WorkerDone) and self._is_training(event.worker):
            self._book(self._seats[event.worker], SAVE)
            self._seats[event.worker].kind = SHUTDOWN
        self._follow(event, state)
        for command in commands:
            self._settle(command)

    def as_json(self) -> dict[str, Any]:
        seats = {w: [s.started_s, s.since_s, s.kind] for w, s in self._seats.items()}
        committed = [
            [step, round(s, 6)] for step, s in islice(reversed(self._committed), STEPS_TOLD)
        ]
        return {
            "started_at_s": self.started_at_s,
            "now_s": self._now_s,
            "ended_s": self._ended_s,
            "seconds": self._seconds,
            "seats": seats,
            "open": [[step, round(s, 6)] for step, s in self._open.items()],
            "committed": committed[::-1],
            "broken": self._broken,
        }

    def go_on(self, values: dict[str, Any], state: State) -> None:
        self.started_at_s, self._now_s = float(values["started_at_s"]), float(values["now_s"])
        self._ended_s = float(values["ended_s"])
        self._seconds = dict.fromkeys(CLASSES, 0.0) | values["seconds"]
        self._seats = {w: SeatAccount(*seat) for w, seat in values["seats"].items()}
        self._open = {int(step): float(s) for step, s in values["open"]}
        self._committed.clear()
        self._committed.extend((int(step), float(s)) for step, s in values["committed"])
        self._broken = [float(s) for s in values["broken"]]
        self._shape, self._ready = _shape_of(state), state.ready

    def _arrive(self, event: ev.WorkerReady) -> None:
        started_s = max(event.started_at_s or self._now_s, self.started_at_s)
        started_s = min(started_s, self._now_s)
        seat = self._seats[event.member.worker] = SeatAccount(started_s, started_s, STARTUP)
        self._book(seat, STARTUP)

    def _leave(self, worker: WorkerId, now_s: float) -> None:
        seat = self._seats.pop(worker)
        self._close(seat)
        self._ended_s += max(seat.since_s, now_s) - seat.started_s

    def _is_training(self, worker: WorkerId) -> bool:
        return worker in self._seats and self._seats[worker].kind == TRAINING

    def _book(self, seat: SeatAccount, kind: str) -> float:
        """The time since it was last booked is of ``kind``."""
        spent = max(0.0, self._now_s - seat.since_s)
        seat.since_s = max(seat.since_s, self._now_s)
        self._seconds[kind] += spent
        return spent

    def _applied(self, event: ev.StepApplied) -> None:
        if not self._is_training(event.worker):
            return
        seat = self._seats[event.worker]
        spent = max(0.0, self._now_s - seat.since_s)
        seat.since_s = max(seat.since_s, self._now_s)
        for kind, name in ((DATA, "data_s"), (SAVE, "save_s")):
            waited = min(max(0.0, float(event.spent.get(name, 0.0))), spent)
            self._seconds[kind] += waited
            spent -= waited
        self._open[event.step] = self._open.get(event.step, 0.0) + spent

    def _resumed(self, event: ev.Resumed, state: State) -> None:
        seat = self._seats.get(event.worker)
        if seat is None or seat.kind != FORMING or state.assignment is None:
            return
        whole = max(0.0, self._now_s - seat.since_s)
        formed = whole if event.forming_s is None else min(max(0.0, event.forming_s), whole)
        seat.kind = restoring_from(state.assignment.source.tier)
        self._seconds[FORMING] += formed
        self._seconds[seat.kind] += whole - formed
        seat.since_s = max(seat.since_s, self._now_s)

    def _follow(self, event: ev.Event, state: State) -> None:
        """Puts every worker where the state says; only those that an event can have moved."""
        shape = _shape_of(state)
        moved: Iterable[WorkerId] = ()
        if shape != self._shape:
            moved = list(self._seats)
        elif isinstance(event, ev.WorkerReady):
            moved = [event.member.worker]
        elif isinstance(event, ev.Paused):
            moved = [event.worker]
        elif state.ready is not self._ready:
            moved = [worker for worker in self._seats if worker not in state.ready]
        for worker in moved:
            self._move(worker, state, shape[:2] == self._shape[:2])
        self._shape, self._ready = shape, state.ready

    def _move(self, worker: WorkerId, state: State, same_phase: bool) -> None:
        seat = self._seats.get(worker)
        if seat is None:
            return
        if worker not in state.ready and state.phase != "ended":
            self._leave(worker, self._now_s)
            return
        kind = class_of(worker, state, seat.kind, same_phase)
        if kind != seat.kind:
            self._close(seat, boundary=not state.abort and state.phase == "pausing")
            seat.kind = kind

    def _close(self, seat: SeatAccount, boundary: bool = False) -> None:
        """Its time in ``kind`` is over."""
        if seat.kind != TRAINING:
            self._book(seat, seat.kind)
        elif boundary:  # the last step was applied: what follows is the way to the safe point
            self._book(seat, FENCING)
        else:
            self._broken.append(self._book(seat, WASTED))

    def _settle(self, command: cmd.Command) -> None:
        """What became of steps."""
        if isinstance(command, cmd.RecordStep):
            spent = self._open.pop(command.step, 0.0)
            self._seconds[PRODUCTIVE] += spent
            self._committed.append((command.step, spent))
        elif isinstance(command, cmd.RollBack):
            while self._committed and self._committed[-1][0] > command.step:
                spent = self._committed.pop()[1]
                self._seconds[PRODUCTIVE] -= spent
                self._seconds[WASTED] += spent
        elif isinstance(command, cmd.FormGeneration):
            step = command.assignment.source.step
            for number in [number for number in self._open if number > step]:
                self._seconds[WASTED] += self._open.pop(number)
        elif isinstance(command, cmd.Journal) and command.event == "recovered":
            noticed_s = command.fields["noticed_s"]
            for spent in self._broken:
                self._seconds[WASTED] -= min(spent, noticed_s)
                self._seconds[NOTICING] += min(spent, noticed_s)
            self._broken.clear()

    def totals(self, now_s: float) -> dict[str, float]:
        found = dict(self._seconds)
        found[PRODUCTIVE] += sum(self._open.values())
        for seat in self._seats.values():
            kind = PRODUCTIVE if seat.kind == TRAINING else seat.kind
            found[kind] += max(0.0, now_s - seat.since_s)
        return {name: max(0.0, seconds) for name, seconds in found.items()}

    def allocated_s(self, now_s: float) -> float:
        alive = (max(now_s, seat.since_s) - seat.started_s for seat in self._seats.values())
        return self._ended_s + sum(alive)


def _shape_of(state: State) -> tuple[Any, ...]:
    return state.phase, state.generation, state.abort, state.assignment is None


def restoring_from(tier: Tier) -> str:
    return {Tier.CHECKPOINT: RESTORE, Tier.INITIAL: STARTUP}.get(tier, RESHARDING)


def class_of(worker: WorkerId, state: State, kind: str, same_phase: bool) -> str:
    """Where a worker that is alive stands. ``kind``: where it stood before the last event."""
    if state.phase == "starting":
        return STARTUP
    if state.phase == "suspended":
        return SUSPENDED
    if state.phase == "ended":
        return SHUTDOWN
    assignment = state.assignment
    assert assignment is not None
    if state.phase == "running":
        if kind == SHUTDOWN and same_phase:
            return SHUTDOWN
        return TRAINING if worker in state.ranks else IDLE
    if state.phase == "pausing":
        if kind == TRAINING and not state.abort and worker not in state.paused:
            return TRAINING  # on to the boundary
        member = worker in state.ranks or any(d.worker == worker for d in assignment.donors)
        return FENCING if member else IDLE
    if worker in state.ranks or any(d.worker == worker for d in assignment.donors):
        resumed = same_phase and kind in (RESHARDING, RESTORE, STARTUP)
        return kind if resumed else FORMING
    return IDLE
