"""The learning rate: a pure function of the global step, never of the world (I3)."""

from __future__ import annotations

import math
from typing import Literal, Protocol


class Schedule(Protocol):
    """The keys of ``config.OptimizerConfig`` that shape the rate."""

    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> Literal["constant", "linear", "cosine"]: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def learning_rate(schedule: Schedule, steps: int, step: int) -> float:
    """Returns the rate of ``step`` (1-based) of ``steps``.

    Linear warm-up to ``lr``, then constant, or a line or half a cosine down to
    ``min_lr_ratio * lr`` at the last step.
    """
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    if schedule.schedule == "constant":
        return schedule.lr
    span = max(1, steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    if schedule.schedule == "linear":
        fraction = 1.0 - done
    else:
        fraction = 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * fraction)
