"""Which micro-batches of a step are this rank's, and with which padding (I2, I3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from elastic_ft.config import Job
from elastic_ft.core.batches import SampleIds, SampleOrder, deal, step_batch

KEPT_MAX = 2  # steps


class Planned(NamedTuple):
    """Attributes:
    number: within the global batch.
    weight: 0 is padding.
    """

    number: int
    ids: SampleIds
    weight: float


class StepPlan:
    """Of one generation, for one of its ranks.

    At a few steps, ``compared_at``, each rank has the global batch's first micro-batch: as padding
    where it is another's, and whose it is once more, as padding behind it. What a loop of the
    user's makes of it must be the same everywhere, and the second time.

    Args:
        ranks, rank: that share out a global batch, and which of them this is.
        first_step: of the generation.
        is_compared: the job's loop is the user's, and any rank can read the first micro-batch.

    Attributes:
        dealt: the numbers of each rank's micro-batches.
    """

    def __init__(
        self,
        job: Job,
        order: SampleOrder,
        ranks: int,
        rank: int,
        first_step: int,
        is_compared: bool,
    ) -> None:
        self._batch, self._order, self._rank = job.batch, order, rank
        self._first_step, self._is_compared = first_step, is_compared and ranks > 1
        self.dealt = deal(job.batch.micro_batches, ranks)
        self._planned: dict[tuple[int, int], list[Planned]] = {}  # the last ones

    def compared_at(self, step: int) -> bool:
        """Where somebody may have come in; and now and then, as ranks may come apart later."""
        return self._is_compared and (step == self._first_step or not step & (step - 1))

    def wanted(self, step: int, per_rank: Callable[[Sequence[int]], int]) -> int:
        """How many micro-batches each rank has at least. ``per_rank``: of what each was dealt."""
        shown = self.compared_at(step)
        counts = [len(dealt) + shown for dealt in self.dealt]
        # Who was dealt as many as the others may have a collective for each.
        return max(counts) if shown else per_rank(counts)

    def micro_batches(self, step: int, wanted: int) -> list[Planned]:
        """This rank's, at least ``wanted``. Asked for as they are requested, and once they are
        read."""
        found = self._planned.get((step, wanted))
        if found is None:
            if len(self._planned) == KEPT_MAX:
                del self._planned[next(iter(self._planned))]
            found = self._planned[step, wanted] = self._plan(step, wanted)
        return found

    def _plan(self, step: int, wanted: int) -> list[Planned]:
        own = self.dealt[self._rank]
        found = [Planned(n, ids, 1.0) for n, ids in zip(own, self._read(step, own), strict=True)]
        if self.compared_at(step):
            (first,) = self._read(step, range(1))
            found.insert(1 if self._rank == 0 else 0, Planned(0, first, 0.0))
        padding = range(own.stop, own.stop + wanted - len(found) if found else own.stop)
        return found + [Planned(number, found[-1].ids, 0.0) for number in padding]

    def _read(self, step: int, numbers: range) -> Sequence[SampleIds]:
        size = self._batch.micro_batch_size
        return step_batch(self._order, step, self._batch.global_batch_size, size, numbers)
