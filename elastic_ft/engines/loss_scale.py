"""fp16's factor of the loss, and what becomes of a step whose gradients are not finite.

All ranks have the same global norm, so they all decide the same.
"""

from __future__ import annotations

import torch

from elastic_ft.config import Job
from elastic_ft.engines.base import Update
from elastic_ft.errors import ElasticError

SCALE_MIN = 1.0  # below it a scale would make no overflow rarer that training survives
OVERFLOWS_TOLD = 5  # in a row: one is as usual


class NonFiniteGradient(ElasticError):
    """The global gradient norm is not a number, and no loss scale explains it."""


class LossScale:
    """Attributes:
    state: what is part of the training state, by name; empty but with fp16.
    """

    def __init__(self, job: Job) -> None:
        precision = job.precision
        self._initial, self._growth_steps = (
            precision.initial_loss_scale,
            precision.loss_scale_growth_steps,
        )
        self._least = min(SCALE_MIN, self._initial)
        self._skips_max = job.optimizer.skip_nonfinite
        self._scale = torch.tensor(self._initial, dtype=torch.float32)
        self._good_steps = torch.tensor(0, dtype=torch.int64)
        self._first_bad: int | None = None  # step, of those in a row
        self._last_bad = 0
        self.state: dict[str, torch.Tensor] = {}
        if precision.dtype == "fp16":
            self.state["engine.loss_scale"] = self._scale
            self.state["engine.loss_scale_good_steps"] = self._good_steps

    @property
    def factor(self) -> float:
        """Of the loss, and so of the gradients."""
        return float(self._scale) if self.state else 1.0

    def reset(self) -> None:
        self._scale.fill_(self._initial)
        self._good_steps.zero_()

    def restored(self) -> None:
        """The state came from outside, perhaps from where it had sunk further."""
        self._scale.clamp_(min=self._least)

    def applied(self) -> None:
        """After a step whose gradients were finite."""
        self._first_bad = None
        if not self.state:
            return
        self._good_steps += 1
        if int(self._good_steps) >= self._growth_steps:
            self._scale.mul_(2.0)
            self._good_steps.zero_()

    def skipped(self, step: int, norm: float) -> Update:
        """Of ``step``, whose gradients are not finite, so that it was not applied.

        Raises NonFiniteGradient if neither a lower loss scale nor the job allows for it.
        """
        first = self._first_bad
        # A step may be run again; and this rank may have been out of the world since.
        if first is None or not first <= step <= self._last_bad + 1:
            first = step
        self._first_bad, self._last_bad = first, step
        in_a_row = step - first + 1
        if self.state and self.factor > self._least:
            self._scale.mul_(0.5).clamp_(min=self._least)
            self._good_steps.zero_()
            note = f"{in_a_row} steps in a row overflowed, the loss scale is {self.factor:g}"
            return Update(norm, skipped=True, note=note if in_a_row == OVERFLOWS_TOLD else "")
        found = f"step {step}: the global gradient norm is {norm}"
        if self.state:
            found += f" at the least loss scale, {self.factor:g}"
        if not self._skips_max:
            raise NonFiniteGradient(f"{found}; optimizer.skip_nonfinite would skip the step")
        if in_a_row > self._skips_max:
            raise NonFiniteGradient(f"{found}, as in the {in_a_row - 1} before it")
        row = f"{in_a_row} of at most {self._skips_max} in a row"
        return Update(norm, skipped=True, note=f"{found}: it is not applied, {row}")
