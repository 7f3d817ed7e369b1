"""Several datasets as one, in fixed proportions.

Each run of ``sum(weights)`` samples has exactly ``weights`` of each, and where a sample comes from
is a function of its index: so a mixture is dealt, lost and dealt again as any dataset is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from elastic_ft.errors import ConfigError


class Mixture:
    """A map-style dataset: ``mixture[i]`` is a sample of one of ``datasets``.

    It is as long as it takes to have each sample of each dataset: those of a dataset that is small
    for its weight come again, none of them before all were there.

    Args:
        weights: whole numbers, of each dataset in ``sum(weights)`` samples.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[int]) -> None:
        if len(datasets) != len(weights) or not datasets:
            raise ConfigError(f"weights: {len(weights)} for {len(datasets)} datasets")
        for weight in weights:
            if type(weight) is not int or weight < 1:
                raise ConfigError(f"weights: expected whole numbers from 1 on, found {weight!r}")
        for number, dataset in enumerate(datasets):
            if len(dataset) == 0:
                raise ConfigError(f"datasets: number {number} has no samples")
        self._datasets, self._weights = list(datasets), list(weights)
        self._ends = list(accumulate(weights))
        shares = zip(datasets, weights, strict=True)
        self._blocks = max(-(-len(dataset) // weight) for dataset, weight in shares)

    def __len__(self) -> int:
        return self._blocks * self._ends[-1]

    def source(self, index: int) -> tuple[int, int]:
        """Which dataset, and which of its samples."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a mixture of {len(self)}")
        block, place = divmod(index, self._ends[-1])
        number = next(n for n, end in enumerate(self._ends) if place < end)
        weight = self._weights[number]
        inside = place - (self._ends[number] - weight)
        return number, (block * weight + inside) % len(self._datasets[number])

    def __getitem__(self, index: int) -> Any:
        number, sample = self.source(index)
        return self._datasets[number][sample]
