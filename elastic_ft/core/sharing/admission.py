"""Who runs: minima, in the order of rank. Pure.

Jobs that wait are taken by priority and age, then those that had to give way, then by their
queue's share of what is used, in proportion to its weight, then in the order of submission. Those
that fit into what their queue owns come before those that borrow. Each runs with its minimum or not
at all. What others have beyond their minima does not stand in its way: that is taken back in place.
If it does not fit even so, others are suspended for it, but only if it runs then: those that borrow
what its queue owns; of its own kind, those of a lower rank, and those that started behind it while
it waited (backfill: they delay nobody).

Thousands may wait, of few kinds (``ledger.Alike``): once one is refused, the others of its kind are
not asked, for room only gets less as the walk goes on. Where somebody has to be suspended it gets
more: then, which is rare, the walk begins again and asks each.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate

from elastic_ft.core.sharing.asks import JobId, SharingTerms
from elastic_ft.core.sharing.ledger import Alike, SharedJob, alike

RETRIES_MAX = 4
GIVES_WAY = "it would have to give way at once, to a job that comes before it"
BEHIND_KEPT = 8  # jobs that wait for room, and that a later one gives way to


class Lack(Enum):
    CEILING = "ceiling"
    NODES = "nodes"
    ROOM = "room"


@dataclass(slots=True)
class Admission:
    """Attributes:
    grants: jobs that wait, and have room now or once others have released it; in order.
    behind: of each of them, those that waited before it and have none.
    victims: who is suspended, and for whom; "": because of a lost node.
    refused: of those apart, who has none.
    lacks: why, in words.
    later: who has room once it may start: see ``Waiting.later``.
    blocked: how many wait for room: as many as their queue's ceiling lets start, too.
    """

    grants: list[SharedJob] = field(default_factory=list)
    behind: dict[JobId, tuple[JobId, ...]] = field(default_factory=dict)
    victims: dict[JobId, JobId] = field(default_factory=dict)
    refused: list[SharedJob] = field(default_factory=list)
    lacks: dict[Alike, str] = field(default_factory=dict)
    later: list[SharedJob] = field(default_factory=list)
    blocked: dict[Alike, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits and could start. ``line``: those that are alike, in the order of submission, and
    so with who has waited for longest first; ``apart``: the others. ``later``: who waits and may
    not start yet: it still has workers to release, or a start of it has just failed."""

    apart: Sequence[SharedJob]
    line: dict[Alike, tuple[JobId, ...]]
    job: Callable[[JobId], SharedJob]
    at_s: float
    later: Sequence[SharedJob] = ()

    def all(self) -> list[SharedJob]:
        return [*self.apart, *(self.job(name) for names in self.line.values() for name in names)]

    def with_apart(self, names: frozenset[JobId]) -> Waiting:
        """Those of ``names`` are looked at one by one."""
        if not names:
            return self
        apart, line = list(self.apart), dict(self.line)
        for kind, waits in self.line.items():
            if found := names.intersection(waits):
                apart.extend(self.job(name) for name in waits if name in found)
                line[kind] = tuple(name for name in waits if name not in found)
        return replace(self, apart=apart, line=line)

    def by_kind(self) -> dict[Alike, list[int]]:
        """How many, and who was submitted first of them; higher priorities first, then by that."""
        found = {
            kind: [len(names), self.job(names[0]).number]
            for kind, names in self.line.items()
            if names
        }
        for job in self.apart:
            here = found.setdefault(alike(job.wish), [0, job.number])
            here[0], here[1] = here[0] + 1, min(here[1], job.number)
        ordered = sorted(found.items(), key=lambda item: (-item[0].priority, item[1][1], item[0]))
        return dict(ordered)

    def split(self, own: Container[JobId]) -> tuple[Waiting, Waiting]:
        """Those of ``own``, which are the first of each kind, and the others."""
        mine, rest = {}, {}
        for kind, names in self.line.items():
            at = bisect_left(names, True, key=lambda name: name not in own)
            mine[kind], rest[kind] = names[:at], names[at:]
        apart = [job for job in self.apart if job.job in own]
        others = [job for job in self.apart if job.job not in own]
        return replace(self, apart=apart, line=mine), replace(self, apart=others, line=rest)


class Lane:
    """Jobs one after the other; ``closed``: the rest are not asked."""

    def __init__(self, names: Sequence[JobId], job: Callable[[JobId], SharedJob]) -> None:
        self._names, self._job, self._at = names, job, 0
        self.closed = False
        self.head = job(names[0]) if names else None

    def go_on(self) -> SharedJob | None:
        self._at += 1
        more = not self.closed and self._at < len(self._names)
        self.head = self._job(self._names[self._at]) if more else None
        return self.head


def lanes_of(waiting: Waiting) -> list[Lane]:
    apart = {job.job: job for job in waiting.apart}
    lanes = [Lane((name,), apart.__getitem__) for name in apart]
    return lanes + [Lane(names, waiting.job) for names in waiting.line.values() if names]


def owners(
    running: Sequence[SharedJob], waiting: Waiting, terms: SharingTerms
) -> Container[JobId] | None:
    """Jobs whose minima fit into what their queues own, the highest of each first; None: all, for
    no queue owns anything."""
    if all(queue.quota is None for queue in terms.queues.values()):
        return None
    left = {name: queue.quota or 0 for name, queue in terms.queues.items()}
    lanes = lanes_of(waiting)
    ran = {job.number: job for job in running}
    heap = [(-job.rank, 0, job.number, -1) for job in running]
    for at, lane in enumerate(lanes):
        if (head := lane.head) is not None:
            heap.append((-head.wish.priority, 1, head.number, at))
    heapq.heapify(heap)
    found: set[JobId] = set()
    while heap:
        _, _, number, at = heapq.heappop(heap)
        job = lanes[at].head if at >= 0 else ran[number]
        assert job is not None
        need, queue = job.least * job.slots, job.wish.queue
        if need <= left[queue]:
            left[queue] -= need
            found.add(job.job)
        elif at >= 0:
            lanes[at].closed = True
        if at >= 0 and (head := lanes[at].go_on()) is not None:
            heapq.heappush(heap, (-head.wish.priority, 1, head.number, at))
    return found


class Givers:
    """Slots of the minima of jobs that may have to give way, by rank."""

    def __init__(self, by_rank: Sequence[SharedJob]) -> None:
        self._ranks = [job.rank for job in by_rank]
        self._slots = [0, *accumulate(job.least * job.slots for job in by_rank)]

    def all(self) -> int:
        return self._slots[-1]

    def below(self, rank: int) -> int:
        return self._slots[bisect_left(self._ranks, rank)]


class Walk:
    """The walk along the queue. ``used``: slots by queue, of minima.

    ``holds_ever``: workers of so many slots that all nodes hold.
    """

    def __init__(
        self,
        running: Sequence[SharedJob],
        waiting: Waiting,
        slots: int,
        terms: SharingTerms,
        holds_ever: Callable[[int], int],
    ) -> None:
        self.terms, self.slots, self.holds_ever = terms, slots, holds_ever
        self.running = sorted(running, key=lambda job: (job.rank, -job.number))
        self.used = dict.fromkeys(terms.queues, 0)
        for job in running:
            self.used[job.wish.queue] += job.least * job.slots
        self.left = slots - sum(self.used.values())
        self.own = owners(running, waiting, terms)
        self.followers: dict[JobId, list[SharedJob]] = {}  # who started behind whom
        for job in running:
            for name in job.behind:
                self.followers.setdefault(name, []).append(job)
        self.waiting = waiting.with_apart(frozenset(self.followers))
        self.blocked: list[SharedJob] = []
        self.found = Admission()
        self._givers: tuple[Givers, Givers] | None = None  # who uses what its queue owns, others
        self._shed()

    def owns(self, job: SharedJob) -> bool:
        return self.own is None or job.job in self.own

    def _shed(self) -> None:
        """Suspends the lowest while not even minima fit: nodes were lost."""
        for job in self.running:
            if self.left >= 0:
                return
            self._suspend(job, "")

    # ------------------------------------------------------------------------------ by kinds

    def by_kinds(self) -> bool:
        """False once somebody has to be suspended: then each must be asked, from the beginning."""
        for part in self._parts():
            for lane, job in in_turn(lanes_of(part), self, part.at_s):
                lack = self._lack(alike(job.wish))
                if lack is Lack.ROOM and self._victims(job):
                    return False
                self._answer(job, lack)
                enough = lack is Lack.CEILING or len(self.blocked) >= BEHIND_KEPT
                lane.closed = lack is not None and enough
        return True

    def _parts(self) -> tuple[Waiting, ...]:
        return (self.waiting,) if self.own is None else self.waiting.split(self.own)

    def _lack(self, kind: Alike) -> Lack | None:
        ceiling = self.terms.queues[kind.queue].ceiling
        if ceiling is not None and self.used[kind.queue] + kind.need > ceiling:
            return Lack.CEILING
        if self.holds_ever(kind.slots) < kind.least:
            return Lack.NODES
        return Lack.ROOM if kind.need > self.left else None

    def _answer(self, job: SharedJob, lack: Lack | None) -> None:
        if lack is None:
            need = job.least * job.slots
            self.left -= need
            self.used[job.wish.queue] += need
            self.found.behind[job.job] = tuple(b.job for b in self.blocked[:BEHIND_KEPT])
            self.found.grants.append(job)
        elif lack is not Lack.CEILING:
            self.blocked.append(job)

    # ---------------------------------------------------------------------------- one by one

    def one_by_one(self) -> None:
        for part in self._parts():
            each = Waiting(part.all(), {}, part.job, part.at_s)
            for _, job in in_turn(lanes_of(each), self, part.at_s):
                made_room = self._ask(job)
                for _ in range(RETRIES_MAX):
                    if not made_room:
                        break
                    # More may have come free than it took: first for those who were refused.
                    refused, self.blocked = self.blocked, []
                    made_room = sum(self._ask(other) for other in refused) > 0

    def _ask(self, job: SharedJob) -> bool:
        """Returns whether others had to make room."""
        kind, victims = alike(job.wish), list[SharedJob]()
        if self._lack(kind) is Lack.ROOM:
            victims = self._victims(job)
            for victim in victims:
                self._suspend(victim, job.job)
        self._answer(job, self._lack(kind))
        return bool(victims)

    def _suspend(self, job: SharedJob, beneficiary: JobId) -> None:
        need = job.least * job.slots
        self.left += need
        self.used[job.wish.queue] -= need
        self.found.victims[job.job] = beneficiary
        self._givers = None

    def _victims(self, job: SharedJob) -> list[SharedJob]:
        """As few as will do, the lowest first; none if all of them would not do."""
        need = job.least * job.slots
        if self.left + self._may_give(job) < need:
            return []
        chosen: list[SharedJob] = []
        left = self.left
        for other in self.running:
            if left >= need:
                break
            if other.job not in self.found.victims and self._gives_way(other, job):
                chosen.append(other)
                left += other.least * other.slots
        if left < need:
            return []
        for other in reversed(list(chosen)):  # the highest first: who need not go stays
            if left - other.least * other.slots >= need:
                chosen.remove(other)
                left -= other.least * other.slots
        return chosen

    def _may_give(self, job: SharedJob) -> int:
        """Slots of all that ``_gives_way`` names, or more: some may be counted twice. Thousands are
        asked that too few would give way to."""
        if self._givers is None:
            left = [other for other in self.running if other.job not in self.found.victims]
            own = [other for other in left if self.owns(other)]
            self._givers = Givers(own), Givers([o for o in left if not self.owns(o)])
        own_slots, borrowed = self._givers
        slots = sum(other.least * other.slots for other in self.followers.get(job.job, ()))
        if self.owns(job):
            return slots + own_slots.below(job.wish.priority) + borrowed.all()
        return slots + borrowed.below(job.wish.priority)

    def _gives_way(self, other: SharedJob, job: SharedJob) -> bool:
        """Who uses what its queue owns comes before who borrows; then rank, then who came first."""
        if self.owns(job) != self.owns(other):
            return self.owns(job)
        return job.wish.priority > other.rank or job.job in other.behind

    # ------------------------------------------------------------------------------ in words

    def explain(self) -> Admission:
        """What was found, and why those wait who have no room."""
        found = self.found
        granted = {job.job for job in found.grants}
        taken = Counter(alike(job.wish) for job in found.grants)
        found.refused = [job for job in self.waiting.apart if job.job not in granted]
        for kind, (count, _) in self.waiting.by_kind().items():
            if (left := count - taken[kind]) > 0:
                lack = self._lack(kind) or Lack.ROOM
                found.lacks[kind] = self._in_words(kind, lack)
                if lack is not Lack.CEILING:
                    found.blocked[kind] = left
        for job in self.waiting.later:
            self._count_later(job)
            if not job.why:
                found.lacks.setdefault(
                    alike(job.wish), f"waits for {job.least} workers: {GIVES_WAY}"
                )
        found.blocked = self._within_ceilings(found.blocked)
        return found

    def _count_later(self, job: SharedJob) -> None:
        """After all that may start now: what is left to it is its own."""
        kind, found = alike(job.wish), self.found
        lack = self._lack(kind)
        if lack is None:
            self.left -= kind.need
            self.used[kind.queue] += kind.need
            found.later.append(job)
        elif lack is not Lack.CEILING:
            found.blocked[kind] = found.blocked.get(kind, 0) + 1

    def _within_ceilings(self, blocked: dict[Alike, int]) -> dict[Alike, int]:
        """Those of them that would start if there were nodes for all."""
        found = dict[Alike, int]()
        used = dict(self.used)
        for kind, jobs in sorted(blocked.items(), key=lambda item: -item[0].priority):
            ceiling = self.terms.queues[kind.queue].ceiling
            if ceiling is not None:
                jobs = min(jobs, (ceiling - used[kind.queue]) // kind.need)
            if jobs > 0:
                found[kind] = jobs
                used[kind.queue] += jobs * kind.need
        return found

    def _in_words(self, kind: Alike, lack: Lack) -> str:
        queue, waits = kind.queue, f"waits for {kind.least} workers"
        match lack:
            case Lack.CEILING:
                most = self.terms.queues[queue].ceiling
                return f"{waits}: queue {queue} needs {self.used[queue]} of the {most} slots it may"
            case Lack.NODES:
                return f"{waits}: the nodes that there are hold {self.holds_ever(kind.slots)}"
        needed = f"{self.slots - self.left} of {self.slots} slots"
        return f"{waits}: jobs that it may not suspend need {needed} at least"


def admitted(
    running: Sequence[SharedJob],
    waiting: Waiting,
    slots: int,
    terms: SharingTerms,
    holds_ever: Callable[[int], int],
) -> Admission:
    """``holds_ever``: workers of so many slots that all nodes hold."""
    walk = Walk(running, waiting, slots, terms, holds_ever)
    if not walk.by_kinds():
        walk = Walk(running, waiting, slots, terms, holds_ever)
        walk.one_by_one()
    return walk.explain()


def in_turn(lanes: list[Lane], walk: Walk, at_s: float) -> Iterator[tuple[Lane, SharedJob]]:
    """By age and priority, then who had to give way. Among equals, the next of the queue that has
    least for its weight by then."""
    terms = walk.terms

    def level(job: SharedJob) -> tuple[int, bool]:
        return -job.aged(at_s, terms.ageing_s), not job.first

    heads = [(level(lane.head), at) for at, lane in enumerate(lanes) if lane.head is not None]
    heapq.heapify(heads)
    while heads:
        highest = heads[0][0]
        equals: dict[str, list[tuple[int, int]]] = {}  # by queue: who was submitted first
        while heads and heads[0][0] == highest:
            _, at = heapq.heappop(heads)
            if (head := lanes[at].head) is not None:
                heapq.heappush(equals.setdefault(head.wish.queue, []), (head.number, at))
        while equals:
            queue = min(equals, key=lambda q: (walk.used[q] / terms.queues[q].weight, q))
            _, at = heapq.heappop(equals[queue])
            if (head := lanes[at].head) is None:
                continue
            yield lanes[at], head
            if (head := lanes[at].go_on()) is not None:
                if level(head) == highest:
                    heapq.heappush(equals[queue], (head.number, at))
                else:
                    heapq.heappush(heads, (level(head), at))
            if not equals[queue]:
                del equals[queue]
