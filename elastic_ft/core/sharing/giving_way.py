"""Who is suspended so that another has room: as few as will do. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from elastic_ft.core.sharing.ledger import SharedJob


def minimum(job: SharedJob) -> int:
    """Slots."""
    return job.least * job.slots


def fewest(able: Iterable[SharedJob], lacking: int) -> list[SharedJob]:
    """Of ``able``, the first ones first, those whose minima are ``lacking`` slots; none if all of
    them are fewer."""
    chosen, freed = list[SharedJob](), 0
    for job in able:
        if freed >= lacking:
            break
        chosen.append(job)
        freed += minimum(job)
    if freed < lacking:
        return []
    for job in reversed(list(chosen)):  # the last first: who need not go stays
        if freed - minimum(job) >= lacking:
            chosen.remove(job)
            freed -= minimum(job)
    return chosen


class Givers:
    """Slots of the minima of jobs that may have to give way, by rank."""

    def __init__(self, by_rank: Sequence[SharedJob]) -> None:
        self._ranks = [job.rank for job in by_rank]
        self._slots = [0, *accumulate(map(minimum, by_rank))]

    def all(self) -> int:
        return self._slots[-1]

    def below(self, rank: int) -> int:
        return self._slots[bisect_left(self._ranks, rank)]
