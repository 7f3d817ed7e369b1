"""Gradient scalers beside their state: what they note while a step is made, and drop after it.

``torch.amp.GradScaler`` knows of each optimizer what it has unscaled, until its ``update``, and
leaves its scale on an optimizer that applies it itself (a fused one) until that has stepped. Of a
step begun in vain both would stay: its next attempt would be refused, or scaled twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic_ft import torch_private

LEFT = ("grad_scale", "found_inf")  # on an optimizer, while it steps; a user may have set the first


class Scales:
    """Args:
    optimizers: of all models.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._scalers: list[torch.amp.GradScaler] = []
        self._before: list[dict[str, Any]] | None = None  # of each optimizer, if a step has begun

    def begin(self) -> None:
        """An attempt at a step begins."""
        self._before = [{k: vars(o)[k] for k in LEFT if k in vars(o)} for o in self._optimizers]

    def end(self) -> None:
        """The step is made."""
        self._before = None

    def use(self, scaler: torch.amp.GradScaler) -> None:
        if all(scaler is not known for known in self._scalers):
            self._scalers.append(scaler)

    def put_back(self, registered: Iterable[torch.amp.GradScaler]) -> None:
        """What an attempt in vain has noted is forgotten."""
        if self._before is None:
            return
        for scaler in (*self._scalers, *registered):
            torch_private.forget_unscaled(scaler)
        for optimizer, before in zip(self._optimizers, self._before, strict=True):
            for key in LEFT:
                vars(optimizer).pop(key, None)
            vars(optimizer).update(before)
        self._before = None
