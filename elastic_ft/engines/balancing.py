"""How many tokens the experts of a model were sent in a step, over all ranks.

The numbers travel in the step's agreement, beside the named metrics (``models.named``), so that a
bias is changed with the parameters or not at all (I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from elastic_ft.engines.modules import plain_name
from elastic_ft.models.experts import MixtureOfExperts


class Balancing:
    """Of the mixtures in ``parts``; there may be none.

    All ranks have numbers of all mixtures, in the order of the ``whole`` model (none: the only
    part): zeros of those that other pipeline stages have.
    """

    def __init__(self, parts: Sequence[nn.Module], whole: nn.Module | None = None) -> None:
        here = {name: mixture for part in parts for name, mixture in _mixtures(part)}
        known = here if whole is None else dict(_mixtures(whole))
        self._slots = [(m.config.n_experts, here.get(name)) for name, m in known.items()]
        self._here = list(here.values())
        self._agreed: Sequence[float] = ()

    def begin(self) -> None:
        self._agreed = ()
        for mixture in self._here:
            mixture.forget()

    def counts(self, weight: float) -> None:
        """Whether the next micro-batch is any, or padding."""
        for mixture in self._here:
            mixture.counts = weight > 0

    def queued(self) -> list[torch.Tensor | float]:
        """To be ``fetched``, whatever the device has still to do for it."""
        found: list[torch.Tensor | float] = []
        for experts, mixture in self._slots:
            load = None if mixture is None else mixture.load  # or had no micro-batch
            found += [0.0] * experts if load is None else [load]
        return found

    def agreed(self, sums: Sequence[float]) -> None:
        """``sums``: as ``queued``, fetched and added up over ranks."""
        self._agreed = sums

    def apply(self) -> None:
        """With the optimizer's step, for which nobody waits."""
        if not self._here:
            return
        loads = torch.tensor(self._agreed, dtype=torch.float64)
        device = self._here[0].bias.device
        if device.type == "cuda":
            loads = loads.pin_memory()
        loads = loads.to(device, non_blocking=True)
        first = 0
        for experts, mixture in self._slots:
            stop = first + experts
            if mixture is not None:
                mixture.balance(loads[first:stop])
            first = stop


def _mixtures(module: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    for name, part in module.named_modules():
        if isinstance(part, MixtureOfExperts):
            yield plain_name(name), part
