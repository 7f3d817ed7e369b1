"""The learning rate: a pure function of the global step, never of the world (I3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

Factor = Callable[[int, int], float]  # (step, steps) -> what the rate is of ``lr``


class RateSchedule(Protocol):
    """The keys of ``config.OptimizerConfig`` that shape the rate."""

    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def scheduled_rate(
    schedule: RateSchedule, steps: int, step: int, factor: Factor | None = None
) -> float:
    """Returns the rate of ``step`` (1-based) of ``steps``.

    Linear warm-up to ``lr``, then as ``factor`` has it, if given, else by ``schedule.schedule``:
    constant; a line or half a cosine down to ``min_lr_ratio * lr`` at the last step; "wsd"
    (warm-up, stable, decay: Hu et al., 2024), constant but for such a line over the last
    ``decay_steps``; "inverse_sqrt" (Vaswani et al., 2017), in which the rate falls with the root of
    the step, no lower than ``min_lr_ratio * lr``.
    """
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    if factor is not None:
        return schedule.lr * factor(step, steps)
    if schedule.schedule == "constant":
        return schedule.lr
    if schedule.schedule == "inverse_sqrt":
        root = math.sqrt(max(1, schedule.warmup_steps) / step)
        return schedule.lr * max(schedule.min_lr_ratio, root)
    span = max(1, steps - schedule.warmup_steps)
    if schedule.schedule == "wsd":
        span = min(span, schedule.decay_steps)
    done = min(1.0, max(0.0, (step - (steps - span)) / span))
    fraction = 1.0 - done
    if schedule.schedule == "cosine":
        fraction = 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * fraction)
