"""Who gets how much of what is there beyond everybody's minimum. Pure.

Higher priorities first. Within one, by weight: a queue's weight is dealt out among its jobs there,
evenly or in proportion to their minima (``SharingTerms.surplus``), and the workers that jobs have
in proportion to their weights rise together (water-filling) until the slots are used or each job
has its maximum, in the multiples that layouts need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from elastic_ft.core.sharing.asks import BY_MINIMUM, JobId, SharingTerms
from elastic_ft.core.sharing.ledger import SharedJob

HALVINGS = 24  # of the level that is searched: 1/2**24 of a worker is none


def ideal_shares(
    jobs: Iterable[SharedJob], slots: int, terms: SharingTerms, used: dict[str, int]
) -> dict[JobId, int]:
    """Workers for each of ``jobs``, whose minima fit into ``slots``.

    ``used``: slots of queues by minima, for those that have a ceiling; what the shares add is
    added to it.
    """
    ordered = sorted(jobs, key=lambda job: (-job.wish.priority, job.number))
    shares = {job.job: job.least for job in ordered}
    left = slots - sum(job.least * job.slots for job in ordered)
    for _, group in groupby(ordered, key=lambda job: job.wish.priority):
        if left <= 0:
            break
        equals = list(group)
        _fill(equals, left, terms, used, shares)
        left -= sum((shares[job.job] - job.least) * job.slots for job in equals)
    return shares


def _fill(
    jobs: Sequence[SharedJob],
    left: int,
    terms: SharingTerms,
    used: dict[str, int],
    shares: dict[JobId, int],
) -> None:
    """Raises the shares of jobs of one priority."""
    weight = _weights(jobs, terms)

    def at(level: float, job: SharedJob) -> int:
        return max(job.least, min(job.most, job.floor(int(level * weight[job.job]))))

    rows = [(job.least, job.most, job.unit, job.slots, weight[job.job]) for job in jobs]

    def cost(level: float) -> int:
        total = 0
        for least, most, unit, slots, own in rows:
            workers = int(level * own) // unit * unit
            if workers > least:
                total += ((workers if workers < most else most) - least) * slots
        return total

    full = max(job.most / weight[job.job] for job in jobs) + 1
    low, high = 0.0, full
    if cost(full) <= left:
        low = full
    else:
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) <= left else (low, middle)
    rest = left
    for job in jobs:  # ceilings cut in the order of submission
        more = at(low, job) - job.least
        ceiling = terms.queues[job.wish.queue].ceiling
        if ceiling is not None:
            room = max(0, ceiling - used[job.wish.queue]) // job.slots
            more = min(more, job.floor(room))
        _raise(job, more, used, shares)
        rest -= more * job.slots
    for job in sorted(jobs, key=lambda job: (shares[job.job] / weight[job.job], job.number)):
        more = job.unit * job.slots
        if more <= rest and shares[job.job] < job.most and may_use(job, more, terms, used):
            _raise(job, job.unit, used, shares)
            rest -= more


def _weights(jobs: Sequence[SharedJob], terms: SharingTerms) -> dict[JobId, float]:
    """Of a worker of each."""
    whole, own = Counter[str](), dict[JobId, int]()
    for job in jobs:
        own[job.job] = job.least if terms.surplus == BY_MINIMUM else 1
        whole[job.wish.queue] += own[job.job] * (job.slots if terms.surplus == BY_MINIMUM else 1)
    return {
        job.job: terms.queues[job.wish.queue].weight * own[job.job] / whole[job.wish.queue]
        for job in jobs
    }


def _raise(job: SharedJob, more: int, used: dict[str, int], shares: dict[JobId, int]) -> None:
    shares[job.job] += more
    used[job.wish.queue] = used.get(job.wish.queue, 0) + more * job.slots


def may_use(job: SharedJob, slots: int, terms: SharingTerms, used: dict[str, int]) -> bool:
    """Its queue's ceiling leaves so many more."""
    ceiling = terms.queues[job.wish.queue].ceiling
    return ceiling is None or used.get(job.wish.queue, 0) + slots <= ceiling
