"""Who runs: minima, in the order of rank. Pure.

Jobs that wait are taken by priority and age, then those that had to give way, then by their
queue's share of what is used, in proportion to its weight, then in the order of submission. Those
that fit into what their queue owns come before those that borrow. Each runs with its minimum or not
at all. What others have beyond their minima does not stand in its way: that is taken back in place.
If it does not fit even so, others are suspended for it, but only if it runs then: those that borrow
what its queue owns; of its own kind, those of a lower rank, and those that started behind it while
it waited (backfill: they delay nobody).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from elastic_ft.core.sharing.asks import JobId, SharingTerms
from elastic_ft.core.sharing.ledger import SharedJob

RETRIES_MAX = 4
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
    waits: what each of the rest lacks.
    why: the same in words.
    blocked: those of them that wait for room, not for their queue's ceiling.
    """

    grants: list[SharedJob] = field(default_factory=list)
    behind: dict[JobId, tuple[JobId, ...]] = field(default_factory=dict)
    victims: dict[JobId, JobId] = field(default_factory=dict)
    waits: dict[JobId, Lack] = field(default_factory=dict)
    why: dict[JobId, str] = field(default_factory=dict)
    blocked: list[SharedJob] = field(default_factory=list)


def in_order(waiting: Iterable[SharedJob], at_s: float, terms: SharingTerms) -> list[SharedJob]:
    """Without queues' shares, which change with each grant."""
    return sorted(
        waiting, key=lambda job: (-job.aged(at_s, terms.ageing_s), not job.first, job.number)
    )


def owners(
    running: Sequence[SharedJob], waiting: Sequence[SharedJob], terms: SharingTerms
) -> frozenset[JobId]:
    """Jobs whose minima fit into what their queues own, the highest of each first."""
    if all(queue.quota is None for queue in terms.queues.values()):
        return frozenset(job.job for job in (*running, *waiting))
    ranks = [(-job.rank, 0, job.number, job) for job in running]
    ranks += [(-job.wish.priority, 1, job.number, job) for job in waiting]
    left = {name: queue.quota or 0 for name, queue in terms.queues.items()}
    found = []
    for _, _, _, job in sorted(ranks, key=lambda entry: entry[:3]):
        need = job.least * job.slots
        if need <= left[job.wish.queue]:
            left[job.wish.queue] -= need
            found.append(job.job)
    return frozenset(found)


class Walk:
    """The walk along the queue. ``used``: slots by queue, of minima."""

    def __init__(
        self,
        running: Sequence[SharedJob],
        waiting: Sequence[SharedJob],
        slots: int,
        terms: SharingTerms,
    ) -> None:
        self.terms = terms
        self.slots = slots
        self.running = sorted(running, key=lambda job: (job.rank, -job.number))
        self.used = dict.fromkeys(terms.queues, 0)
        for job in running:
            self.used[job.wish.queue] += job.least * job.slots
        self.left = slots - sum(self.used.values())
        self.own = owners(running, waiting, terms)
        self.given_way = frozenset(name for job in running for name in job.behind)
        self.found = Admission()

    def shed(self) -> None:
        """Suspends the lowest while not even minima fit: nodes were lost."""
        for job in self.running:
            if self.left >= 0:
                return
            self._suspend(job, "")

    def admit(self, job: SharedJob, holds_ever: int) -> bool:
        """Returns whether others had to make room."""
        need, queue = job.least * job.slots, self.terms.queues[job.wish.queue]
        if queue.ceiling is not None and self.used[job.wish.queue] + need > queue.ceiling:
            self.found.waits[job.job] = Lack.CEILING
            return False
        if holds_ever < job.least:
            self.found.waits[job.job] = Lack.NODES
            self.found.blocked.append(job)
            return False
        victims = self._victims(job, need)
        for victim in victims:
            self._suspend(victim, job.job)
        if need > self.left:
            self.found.waits[job.job] = Lack.ROOM
            self.found.blocked.append(job)
            return False
        self.found.waits.pop(job.job, None)
        self.left -= need
        self.used[job.wish.queue] += need
        self.found.behind[job.job] = tuple(b.job for b in self.found.blocked[:BEHIND_KEPT])
        self.found.grants.append(job)
        return bool(victims)

    def in_words(self, job: SharedJob, holds_ever: int) -> str:
        """Why it waits, once everybody was looked at."""
        queue, waits = job.wish.queue, f"waits for {job.least} workers"
        match self.found.waits[job.job]:
            case Lack.CEILING:
                most = self.terms.queues[queue].ceiling
                return f"{waits}: queue {queue} needs {self.used[queue]} of the {most} slots it may"
            case Lack.NODES:
                return f"{waits}: the nodes that there are hold {holds_ever}"
        needed = f"{self.slots - self.left} of {self.slots} slots"
        return f"{waits}: jobs that it may not suspend need {needed} at least"

    def _suspend(self, job: SharedJob, beneficiary: JobId) -> None:
        need = job.least * job.slots
        self.left += need
        self.used[job.wish.queue] -= need
        self.found.victims[job.job] = beneficiary

    def _victims(self, job: SharedJob, need: int) -> list[SharedJob]:
        """As few as will do, the lowest first; none if all of them would not do."""
        if need <= self.left or not self._may_have_victims(job):
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

    def _may_have_victims(self, job: SharedJob) -> bool:
        if not self.running:
            return False
        lower = job.wish.priority > self.running[0].rank
        borrowed = job.job in self.own and any(other.job not in self.own for other in self.running)
        return lower or borrowed or job.job in self.given_way

    def _gives_way(self, other: SharedJob, job: SharedJob) -> bool:
        """Who uses what its queue owns comes before who borrows; then rank, then who came first."""
        if (job.job in self.own) != (other.job in self.own):
            return job.job in self.own
        return job.wish.priority > other.rank or job.job in other.behind


def walk(
    counter: Walk, waiting: Sequence[SharedJob], at_s: float, holds_ever: dict[int, int]
) -> Admission:
    """``holds_ever``: workers that all nodes hold, by the slots that one takes."""
    counter.shed()
    own = [job for job in waiting if job.job in counter.own]
    borrowers = [job for job in waiting if job.job not in counter.own]
    for jobs in (own, borrowers):
        for job in _by_share(counter, jobs, at_s):
            made_room = counter.admit(job, holds_ever[job.slots])
            for _ in range(RETRIES_MAX):
                if not made_room:
                    break
                # More may have come free than it took: first for those who were refused.
                refused, counter.found.blocked = counter.found.blocked, []
                again = [counter.admit(other, holds_ever[other.slots]) for other in refused]
                made_room = any(again)
    found = counter.found
    lack = (job for job in waiting if job.job in found.waits)
    found.why = {job.job: counter.in_words(job, holds_ever[job.slots]) for job in lack}
    return found


def _by_share(counter: Walk, waiting: Sequence[SharedJob], at_s: float) -> Iterator[SharedJob]:
    """Among equals, the next of the queue that has least for its weight by then."""
    terms = counter.terms
    equals: list[SharedJob] = []
    key: tuple[int, bool] | None = None

    def dealt() -> Iterator[SharedJob]:
        lines: dict[str, deque[SharedJob]] = {}
        for job in equals:
            lines.setdefault(job.wish.queue, deque()).append(job)
        while lines:
            name = min(lines, key=lambda q: (counter.used[q] / terms.queues[q].weight, q))
            yield lines[name].popleft()
            if not lines[name]:
                del lines[name]

    for job in in_order(waiting, at_s, terms):
        mine = (job.aged(at_s, terms.ageing_s), job.first)
        if mine != key:
            yield from dealt()
            equals, key = [], mine
        equals.append(job)
    yield from dealt()
