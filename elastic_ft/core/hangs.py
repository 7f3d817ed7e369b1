"""Who hangs: a pure judgement over progress marks. The controller asks a few times a second.

Times are seconds of one clock, and are given, never taken.

How long members may stand still follows the steps that were measured: ``hang_timeout_s`` suits
steps that are short, and where a step by itself takes longer than that, it is no hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.core.state import State

FIRST_STEP_TIMEOUTS = 4  # hang timeouts to stand still for, before any step was measured
STILL_STEPS = 3  # usual steps to stand still for, once some were
STEPS_USUAL = 15  # the last ones: their median is the usual one
LAST_RESORT_TIMEOUTS = 10  # hang timeouts, of what only ends a wait that nobody judges


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of one worker's progress."""

    step: int
    place: int  # named points that its training thread has reached in that step
    points: int  # named points reached in all
    moved_at_s: float  # when any of these last changed
    heard_at_s: float  # when anything at all was heard
    layers_left: int = (
        -1
    )  # passes of layers, either way, that its GPU has yet to end; -1: not known


@dataclass(frozen=True, slots=True)
class Hung:
    reason: str
    since_s: float  # when it was last well


@dataclass(frozen=True, slots=True)
class Judgement:
    """Attributes:
    hung: the workers to give up.
    stuck: nobody moves, and nobody can be told from the others: whoever then fails to reach its
        safe point is the one.
    """

    hung: dict[WorkerId, Hung]
    stuck: str = ""


class Progress:
    """The marks of all workers, and when each node's keeper was last heard.

    Args:
        hang_timeout_s: of standing still inside a step; see ``still_max_s``.
        heartbeat_timeout_s: of silence.
    """

    def __init__(self, hang_timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._hang_timeout_s, self._heartbeat_timeout_s = hang_timeout_s, heartbeat_timeout_s
        self.marks: dict[WorkerId, Mark] = {}
        self._keepers_heard_at_s: dict[NodeId, float] = {}
        self._steps_worker_s: deque[float] = deque(maxlen=STEPS_USUAL)

    def forget(self) -> None:
        """A new generation, or all is to be seen anew: of workers. Keepers know no generations."""
        self.marks = {}

    def beat(
        self,
        worker: WorkerId,
        step: int,
        place: int,
        points: int,
        layers_left: int = -1,
        *,
        now_s: float,
    ) -> None:
        """Says what ``Mark`` has of ``worker``."""
        mark = Mark(step, place, points, now_s, now_s, layers_left)
        old = self.marks.get(worker, mark)
        if replace(old, moved_at_s=now_s, heard_at_s=now_s) == mark:
            mark = replace(mark, moved_at_s=old.moved_at_s)
        self.marks[worker] = mark

    def heard(self, worker: WorkerId, now_s: float) -> None:
        """It has said anything at all: it is not silent."""
        if (old := self.marks.get(worker)) is not None:
            self.marks[worker] = replace(old, heard_at_s=now_s)

    def keeper_beat(self, node: NodeId, now_s: float) -> None:
        self._keepers_heard_at_s[node] = now_s

    def applied(self, worker: WorkerId, step: int, now_s: float) -> None:
        old = self.marks.get(worker)
        self.marks[worker] = Mark(step, 0, old.points if old else 0, now_s, now_s)

    def measured(self, took_s: float, world: int) -> None:
        """A step of so many members has taken ``took_s``; 0 tells nothing."""
        if took_s > 0:
            self._steps_worker_s.append(took_s * world)

    def still_max_s(self, world: int) -> float:
        """For how long all of so many members may stand still inside a step.

        Their steps take as much longer as they are fewer than those measured.
        """
        if not self._steps_worker_s:
            return FIRST_STEP_TIMEOUTS * self._hang_timeout_s
        usual_s = median(self._steps_worker_s) / max(world, 1)
        return max(self._hang_timeout_s, STILL_STEPS * usual_s)

    def overlook(self, absent_s: float) -> None:
        """Time in which nobody looked (we were stopped, starved) says nothing of workers."""
        for worker, mark in self.marks.items():
            moved_at_s, heard_at_s = mark.moved_at_s + absent_s, mark.heard_at_s + absent_s
            self.marks[worker] = replace(mark, moved_at_s=moved_at_s, heard_at_s=heard_at_s)
        for node in self._keepers_heard_at_s:
            self._keepers_heard_at_s[node] += absent_s

    def still_s(self, state: State, now_s: float) -> dict[int, float]:
        """By rank, for how long it has not moved."""
        members = self._of(state, state.ranks, now_s)
        return {state.ranks[worker]: now_s - mark.moved_at_s for worker, mark in members.items()}

    def judge(self, state: State, now_s: float) -> Judgement:
        """Silence tells of everyone; standing still of members that train, or are on their way to
        a boundary. Breaking off and forming have deadlines of their own. Who has still to call a
        new controller says nothing to it: ``Policy.return_timeout_s`` is for them."""
        for worker in state.adoption.workers if state.adoption else ():
            self.marks[worker] = Mark(0, 0, 0, now_s, now_s)
        silent = find_silent(self._of(state, state.ready, now_s), now_s, self._heartbeat_timeout_s)
        if silent:
            return Judgement(silent)
        moving = self._of(state, state.ranks, now_s) if _trains(state) else {}
        if state.phase == "pausing":
            moving = {worker: mark for worker, mark in moving.items() if worker not in state.paused}
        still_max_s = self.still_max_s(len(state.ranks))
        if not stand_still(moving, now_s, still_max_s):
            return Judgement({})
        behind = find_behind(moving, now_s)
        stuck = f"nobody moved for {still_max_s:g} s, all at the same place"
        return Judgement(behind, "" if behind else stuck)

    def silent_keepers(self, state: State, now_s: float) -> dict[NodeId, Hung]:
        """In whatever phase. One that starts again is as of its first word, as is one that has
        still to call a new controller."""
        for node in state.adoption.keepers if state.adoption else ():
            self._keepers_heard_at_s[node] = now_s
        heard = {node: self._keepers_heard_at_s.get(node, now_s) for node in state.keepers}
        self._keepers_heard_at_s = heard
        return {
            node: _silent(heard_at_s, now_s)
            for node, heard_at_s in heard.items()
            if now_s - heard_at_s > self._heartbeat_timeout_s
        }

    def _of(self, state: State, workers: Mapping[WorkerId, object], now_s: float) -> Marks:
        """Of those that are up; who was never heard of is as of now."""
        there = [worker for worker in workers if worker in state.ready]
        return {w: self.marks.setdefault(w, Mark(0, 0, 0, now_s, now_s)) for w in there}


Marks = Mapping[WorkerId, Mark]


def _trains(state: State) -> bool:
    return state.phase == "running" or (state.phase == "pausing" and not state.abort)


def find_silent(marks: Marks, now_s: float, heartbeat_timeout_s: float) -> dict[WorkerId, Hung]:
    """Silence is proof enough: a stopped process sends nothing."""
    return {
        worker: _silent(mark.heard_at_s, now_s)
        for worker, mark in marks.items()
        if now_s - mark.heard_at_s > heartbeat_timeout_s
    }


def _silent(heard_at_s: float, now_s: float) -> Hung:
    return Hung(f"nothing heard for {now_s - heard_at_s:.1f} s", heard_at_s)


def find_behind(marks: Marks, now_s: float) -> dict[WorkerId, Hung]:
    """Of members of whom none moves: a worker that stands still drags all others with it into
    their collectives, so those furthest behind are to blame. None if all are at one place.

    Where their threads are at one place, as they wait for their GPUs, it is by what these have
    still to compute, if that is known of all.
    """
    places = {worker: (mark.step, mark.place) for worker, mark in marks.items()}
    behind, ahead = min(places.values()), max(places.values())
    if behind != ahead:
        found = (worker for worker, place in places.items() if place == behind)
        return {worker: _still(marks[worker], now_s, "furthest behind") for worker in sorted(found)}
    left = {worker: mark.layers_left for worker, mark in marks.items()}
    most, least = max(left.values()), min(left.values())
    if least < 0 or most == least:
        return {}
    why = f"its GPU has {most} passes of layers left, another's {least}"
    slowest = sorted(worker for worker, layers in left.items() if layers == most)
    if 2 * len(slowest) > len(left):  # one has come further by chance: it is not the others' fault
        return {}
    return {worker: _still(marks[worker], now_s, why) for worker in slowest}


def _still(mark: Mark, now_s: float, why: str) -> Hung:
    return Hung(f"no progress for {now_s - mark.moved_at_s:.1f} s, {why}", mark.moved_at_s)


def stand_still(marks: Marks, now_s: float, still_max_s: float) -> bool:
    """Whether there are members and none has moved for ``still_max_s``."""
    return bool(marks) and all(now_s - m.moved_at_s > still_max_s for m in marks.values())
