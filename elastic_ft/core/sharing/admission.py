"""Who runs: minima, in the order of rank. Pure.

Jobs that wait are taken by priority and age, then those that had to give way, then by their
queue's share of what is used, in proportion to its weight, then in the order of submission. Those
that fit into what their queue owns come before those that borrow. Each runs with its minimum or not
at all. What others have beyond their minima does not stand in its way: that is taken back in place.
If it does not fit even so, others are suspended for it, but only if it runs then: those that borrow
what its queue owns; of its own kind, those of a lower rank, and those that started behind it while
it waited (backfill: they delay nobody). Under its queue's ceiling: those of a lower rank there.

Thousands may wait, of few kinds (``ledger.Alike``): once one is refused, the others of its kind are
not asked, for room only gets less as the walk goes on. Where somebody has to be suspended it gets
more: then, which is rare, the walk begins again and asks each.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from elastic_ft.core.sharing.asks import JobId, SharingTerms
from elastic_ft.core.sharing.giving_way import Givers, fewest, minimum
from elastic_ft.core.sharing.ledger import Alike, SharedJob, alike

RETRIES_MAX = 4
VAIN_MAX = 64  # kinds that wait under a ceiling, for whom others are chosen and need not go
BEHIND_KEPT = 8  # jobs that wait for room, and that a later one gives way to


Fits = Callable[[SharedJob, Sequence[SharedJob]], bool]


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


class Walk:
    """The walk along the queue. ``used``: slots by queue, of minima.

    ``holds_ever``: workers of so many slots that all nodes hold. ``fits``: whether a job's minimum
    does once those others are gone, nodes as they are.
    """

    def __init__(
        self,
        running: Sequence[SharedJob],
        waiting: Waiting,
        slots: int,
        terms: SharingTerms,
        holds_ever: Callable[[int], int],
        fits: Fits,
    ) -> None:
        self.terms, self.slots, self.holds_ever, self.fits = terms, slots, holds_ever, fits
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
        self._refused: dict[str | None, int] = {}  # slots, the least by queue; None: of all nodes
        self._in_vain: set[Alike] = set()  # for whom nobody of its queue need go
        # By queue; None: of all. Who uses what its queue owns, and who borrows.
        self._givers: dict[str | None, tuple[Givers, Givers]] = {}
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
                if self._victims(job, lack):
                    return False
                self._answer(job, lack)
                enough = lack is Lack.CEILING or len(self.blocked) >= BEHIND_KEPT
                lane.closed = lack is not None and enough
        return True

    def _parts(self) -> tuple[Waiting, ...]:
        return (self.waiting,) if self.own is None else self.waiting.split(self.own)

    def _lack(self, kind: Alike) -> Lack | None:
        if kind.need > self._under_ceiling(kind.queue):
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
            return
        if lack is not Lack.CEILING:
            self.blocked.append(job)
        if lack is not Lack.NODES:
            need, of = minimum(job), job.wish.queue if lack is Lack.CEILING else None
            if of is not None and self._under_ceiling(of) + self._may_give(job, lack) >= need:
                of = None  # there it would have room
            self._refused[of] = min(need, self._refused.get(of, self.slots))

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
        kind = alike(job.wish)
        victims = self._victims(job, self._lack(kind))
        for victim in victims:
            self._suspend(victim, job.job)
        self._answer(job, self._lack(kind))
        return bool(victims)

    def _suspend(self, job: SharedJob, beneficiary: JobId) -> None:
        need = job.least * job.slots
        self.left += need
        self.used[job.wish.queue] -= need
        self.found.victims[job.job] = beneficiary
        self._givers.clear()
        self._in_vain.clear()

    def _victims(self, job: SharedJob, lack: Lack | None) -> list[SharedJob]:
        """As few as will do, the lowest first; none if all of them would not do."""
        if lack is Lack.ROOM:
            return self._fewest(job, lack, minimum(job) - self.left)
        kind, queue = alike(job.wish), job.wish.queue
        if lack is not Lack.CEILING or kind in self._in_vain or len(self._in_vain) >= VAIN_MAX:
            return []
        lacking = max(minimum(job) - self.left, minimum(job) - self._under_ceiling(queue))
        chosen = self._fewest(job, lack, lacking)
        if not chosen or self._starts_without(job, chosen):
            return chosen
        self._in_vain.add(kind)
        return []

    def _fewest(self, job: SharedJob, lack: Lack, lacking: int) -> list[SharedJob]:
        if self._may_give(job, lack) < lacking:
            return []
        running = (other for other in self.running if other.job not in self.found.victims)
        gives_way = self._gives_way if lack is Lack.ROOM else self._gives_way_inside
        return fewest((other for other in running if gives_way(other, job)), lacking)

    def _starts_without(self, job: SharedJob, chosen: Sequence[SharedJob]) -> bool:
        """Under its queue's ceiling. Not where what comes free lies apart, nor where those would
        have it whose turn was before: they have waited for longer than those have who would go."""
        if self.holds_ever(job.slots) < job.least:
            return False
        if job.slots > 1 and (self.found.grants or not self.fits(job, chosen)):
            return False
        freed = sum(map(minimum, chosen))
        room, under = self.left + freed, self._under_ceiling(job.wish.queue) + freed
        mine, all_nodes = self._refused.get(job.wish.queue), self._refused.get(None)
        return not (all_nodes and all_nodes <= room) and not (mine and mine <= min(room, under))

    def _under_ceiling(self, queue: str) -> int:
        ceiling = self.terms.queues[queue].ceiling
        return sys.maxsize if ceiling is None else ceiling - self.used[queue]

    def _may_give(self, job: SharedJob, lack: Lack) -> int:
        """Slots of all that give way to it, or more: some may be counted twice. Thousands are asked
        that too few would give way to."""
        of, rank = job.wish.queue if lack is Lack.CEILING else None, job.wish.priority
        if (found := self._givers.get(of)) is None:
            able = [other for other in self.running if of is None or other.wish.queue == of]
            able = [other for other in able if other.job not in self.found.victims]
            own = Givers([other for other in able if self.owns(other)])
            found = self._givers[of] = own, Givers([o for o in able if not self.owns(o)])
        own, borrowed = found
        slots = borrowed.below(rank) + (own.below(rank) if self.owns(job) else 0)
        if lack is Lack.ROOM:
            slots += sum(map(minimum, self.followers.get(job.job, ())))
            slots += borrowed.all() - borrowed.below(rank) if self.owns(job) else 0
        return slots

    def _gives_way(self, other: SharedJob, job: SharedJob) -> bool:
        """Who uses what its queue owns comes before who borrows; then rank, then who came first."""
        if self.owns(job) != self.owns(other):
            return self.owns(job)
        return job.wish.priority > other.rank or job.job in other.behind

    def _gives_way_inside(self, other: SharedJob, job: SharedJob) -> bool:
        """Under their queue's ceiling, to a higher priority alone: who gave way can't come back in
        the same way."""
        if other.wish.queue != job.wish.queue or job.wish.priority <= other.rank:
            return False
        return self.owns(job) or not self.owns(other)

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
    fits: Fits,
) -> Admission:
    """``holds_ever``, ``fits``: as ``Walk``'s."""
    walk = Walk(running, waiting, slots, terms, holds_ever, fits)
    if not walk.by_kinds():
        walk = Walk(running, waiting, slots, terms, holds_ever, fits)
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
