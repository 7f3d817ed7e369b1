"""Who asks a DataLoader for its length before it is prepared is told that it counts micro-batches.

Schedules are made of that, of total_steps = len(loader) * epochs, say: one of a script that was
accumulating gradients, or dealt its samples over processes, would be as many times too long.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

from torch.utils.data import DataLoader

from elastic_ft.config.trained import BatchConfig

_asked: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def watch_lengths() -> None:
    """From now on, in this process."""
    plain = DataLoader.__len__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def noted(loader: DataLoader[Any]) -> int:
        _asked.add(loader)
        return plain(loader)

    DataLoader.__len__ = noted  # type: ignore[method-assign]


def warn_of_length(loader: DataLoader[Any], batch: BatchConfig, steps: int) -> None:
    """``steps``: of one pass over what was prepared."""
    if loader in _asked and batch.micro_batches > 1:
        warnings.warn(
            f"len(loader) before ctx.prepare is {len(loader)} micro-batches, after it {steps} "
            f"steps, of {batch.micro_batches} micro-batches each: a schedule, or a total, counts "
            "steps; make it of the length after ctx.prepare, and give a scheduler to ctx.register",
            stacklevel=5,
        )
