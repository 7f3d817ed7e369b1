"""An order of samples that somebody else has chosen, epoch by epoch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from elastic_ft.core.batches import SampleIds
from elastic_ft.errors import DataError

EPOCHS_KEPT = 2  # a batch may straddle two


class EpochOrder:
    """In the place of ``core.batches.DataOrder``: the same sequence in every world (I2).

    Args:
        size: samples in the dataset.
        shuffled: for an epoch, from 0: all indices of the dataset, once each, a function of the
            epoch alone. Raises DataError later if it is not that.
    """

    def __init__(self, size: int, shuffled: Callable[[int], Iterable[int]]) -> None:
        self._size, self._shuffled = size, shuffled
        self._epochs: dict[int, array[int]] = {}

    def sample_ids(self, position_start: int, position_stop: int) -> SampleIds:
        """As ``DataOrder.sample_ids``."""
        return tuple(self._sample_id(p) for p in range(position_start, position_stop))

    def _sample_id(self, position: int) -> int:
        epoch, index = divmod(position, self._size)
        if epoch not in self._epochs:
            self._epochs[epoch] = self._drawn(epoch)
            while len(self._epochs) > EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
        return epoch * self._size + self._epochs[epoch][index]

    def _drawn(self, epoch: int) -> array[int]:
        drawn = array("q", self._shuffled(epoch))
        if len(drawn) != self._size or set(drawn) != set(range(self._size)):
            raise DataError(
                f"the sampler's epoch {epoch} is {len(drawn)} indices, expected each of "
                f"{self._size} once"
            )
        return drawn
