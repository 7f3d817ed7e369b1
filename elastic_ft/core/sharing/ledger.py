"""What the scheduler knows: jobs, nodes, who holds what. Data that is replaced, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from elastic_ft.core.sharing.asks import JobId, Places, Wish
from elastic_ft.core.table import Table

ENDED_KEPT = 4096  # ids that are remembered, at least: none is used twice


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A job that has not ended.

    Attributes:
        number: in the order in which jobs were submitted.
        cap: workers that somebody asked for; None: ``wish.most``.
        target: workers that it was told to have.
        held: where it has workers, or was promised room: not free until it is released.
        leaving: of ``held``, what it was told to release, and has not yet.
        resized_at_s: when ``target`` last changed while it had workers.
        waits_since_s: when it was submitted or suspended, unless it has workers.
        waited_s: of its waits before.
        rank: its priority, and what waiting had added to it when it was started.
        behind: jobs that had waited longer and could not start then: it gives way to them.
        releasing: it was told to suspend, and has not said yet that it has.
        start: how often it was started: what is told of an earlier start is no news.
        ran: its workers have trained.
        first: it was running when it had to give way: it comes first among its equals.
        failed_starts: in a row.
        losses: of its controllers, since it last got further than ``lost_at``, a step.
        not_before_s: no start before that.
        reserved: nodes on which it waits for room that lies apart now: nobody else gets any there.
        why: why it waits, in words; "": see ``why_waits``.
    """

    job: JobId
    wish: Wish
    number: int
    phase: str = "queued"
    cap: int | None = None
    target: int = 0
    held: Places = ()
    leaving: Places = ()
    resized_at_s: float = 0.0
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    rank: int = 0
    behind: tuple[JobId, ...] = ()
    releasing: bool = False
    start: int = 0
    ran: bool = False
    first: bool = False
    failed_starts: int = 0
    losses: int = 0
    lost_at: int = -1
    not_before_s: float = 0.0
    reserved: tuple[str, ...] = ()
    why: str = ""

    @property
    def has_room(self) -> bool:
        """It has workers, and is to keep them."""
        return self.phase in ("starting", "running")

    @property
    def owed(self) -> int:
        """Workers that it should have and has no room for, since a node was lost."""
        return max(0, self.target - count(self.held) + count(self.leaving))

    @property
    def least(self) -> int:
        return self.wish.least

    @property
    def most(self) -> int:
        """Workers that it is given at most."""
        if self.cap is None:
            return self.wish.most
        return max(self.least, min(self.wish.most, self.floor(self.cap)))

    @property
    def unit(self) -> int:
        return self.wish.multiple_of

    @property
    def slots(self) -> int:
        """That one worker takes."""
        return self.wish.slots_per_worker

    def floor(self, workers: int) -> int:
        return workers // self.unit * self.unit

    def aged(self, at_s: float, ageing_s: float) -> int:
        """The priority that it has by now in the queue."""
        waited_s = self.waited_s + max(0.0, at_s - self.waits_since_s)
        return self.wish.priority + int(waited_s // ageing_s)

    def ages_at_s(self, at_s: float, ageing_s: float) -> float:
        """When it will count as one higher."""
        waited_s = self.waited_s + at_s - self.waits_since_s
        return at_s + (ageing_s - waited_s % ageing_s)


@dataclass(frozen=True, slots=True, order=True)
class Alike:
    """Of jobs that wait, what decides whether there is room: it is the same for all alike.

    Attributes:
        least: workers that it starts with.
        slots: that one of them takes.
    """

    queue: str
    priority: int
    least: int
    slots: int

    @property
    def need(self) -> int:
        return self.least * self.slots


def alike(wish: Wish) -> Alike:
    return Alike(wish.queue, wish.priority, wish.least, wish.slots_per_worker)


Bundles = tuple[tuple[int, int], ...]  # slots of one worker, and how many of those


@dataclass(frozen=True, slots=True)
class Sharing:
    """The state.

    Attributes:
        jobs: all that have not ended, in the order of submission.
        line: those of them that were never started and have nothing of their own to say, alike by
            alike, in the order of submission; thousands may wait (``core.sharing.waiting_line``).
        apart: the others.
        lacks: why those wait that have room nowhere, in words.
        ended: how jobs ended.
        nodes: slots.
        asked: of the autoscaler: what the cluster should hold; empty if nothing is missing.
    """

    jobs: Table[JobId, SharedJob] = field(default_factory=Table)
    line: Table[Alike, tuple[JobId, ...]] = field(default_factory=Table)
    apart: tuple[JobId, ...] = ()
    lacks: Table[Alike, str] = field(default_factory=Table)
    ended: Table[JobId, str] = field(default_factory=Table)
    nodes: Table[str, int] = field(default_factory=Table)
    submitted: int = 0
    asked: Bundles = ()
    wake_at_s: float | None = None


def why_waits(state: Sharing, job: SharedJob) -> str:
    """In words; "" if it has room, or is to stop."""
    if job.phase not in ("queued", "suspended"):
        return ""
    return job.why or str(state.lacks.get(alike(job.wish), ""))


def slots_of(job: SharedJob) -> int:
    """That its workers take where they are, those included that are told to go."""
    return count(job.held) * job.slots


def count(places: Places) -> int:
    return sum(workers for _, workers in places)


def added(*places: Places) -> Places:
    found: dict[str, int] = {}
    for node, workers in chain.from_iterable(places):
        found[node] = found.get(node, 0) + workers
    return tuple(sorted(found.items()))


def removed(places: Places, less: Places) -> Places:
    """Workers that are not there are none of it."""
    gone = dict(less)
    left = ((node, workers - gone.get(node, 0)) for node, workers in places)
    return tuple((node, workers) for node, workers in left if workers > 0)


def as_many(places: Places, workers: int) -> Places:
    """``workers`` of ``places``, the first ones first. Of a node that comes again it is the larger
    number that counts."""
    chosen: dict[str, int] = {}
    for node, here in places:
        more = min(here - chosen.get(node, 0), workers)
        if more > 0:
            chosen[node] = chosen.get(node, 0) + more
            workers -= more
    return tuple(sorted(chosen.items()))
