"""How many tokens the experts of a model were sent in a step, over all ranks.

The numbers travel in the step's agreement, beside the named metrics (``models.named``), so that a
bias is changed with the parameters or not at all (I4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from elastic_ft.models.experts import MixtureOfExperts


class Balancing:
    """Of the mixtures in ``parts``; there may be none."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._mixtures = [
            m for part in parts for m in part.modules() if isinstance(m, MixtureOfExperts)
        ]
        self._agreed: Sequence[float] = ()

    def begin(self) -> None:
        self._agreed = ()
        for mixture in self._mixtures:
            mixture.forget()

    def counts(self, weight: float) -> None:
        """Whether the next micro-batch is any, or padding."""
        for mixture in self._mixtures:
            mixture.counts = weight > 0

    def sums(self) -> list[float]:
        found: list[float] = []
        for mixture in self._mixtures:
            if mixture.load is None:  # this rank had no micro-batch
                found += [0.0] * mixture.config.n_experts
            else:
                found += [float(count) for count in mixture.load.tolist()]
        return found

    def agreed(self, sums: Sequence[float]) -> None:
        """``sums``: as of ``sums``, added up over ranks."""
        self._agreed = sums

    def apply(self) -> None:
        """With the optimizer's step."""
        first = 0
        for mixture in self._mixtures:
            stop = first + mixture.config.n_experts
            mixture.balance(self._agreed[first:stop])
            first = stop
