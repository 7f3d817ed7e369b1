"""Datasets that draw random numbers (augmentation, masking) from the global generators.

Read while a step is computed such a dataset would disturb the step's draws, and get others in every
world. So it is read between two steps, each sample with draws of its own: a function of the seed
and the sample (I3).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


class Draws:
    """Whether reading draws, and what. Of one dataset, for the one thread that reads it.

    Args:
        seed: of the job; None: draws go on from where they are, as in a plain loop.

    Attributes:
        known: whether it draws, once something was read.
    """

    def __init__(self, seed: Callable[[], int | None]) -> None:
        self._seed = seed
        self.known: bool | None = None
        self._begun: tuple[Any, ...] = ()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around reading a micro-batch: the generators are then as they were before."""
        if self.known is False:
            yield
            return
        before = self._begun = _states()
        try:
            yield
        finally:
            if self.known is None:
                self.known = not _equal(_states(), self._begun)
            if self._seed() is not None:
                _put_back(before)

    def begin(self, sample_id: int, collating: bool = False) -> None:
        """What is drawn next is of this sample."""
        seed = self._seed()
        if self.known is False or seed is None:
            return
        if self.known is None:
            self.known = None if _equal(_states(), self._begun) else True
        value = ((seed * 1_000_003 + sample_id) * 2 + collating) % (1 << 64)
        torch.default_generator.manual_seed(value)
        random.seed(value)
        np.random.seed([value & 0xFFFFFFFF, value >> 32])
        if self.known is None:
            self._begun = _states()


def _states() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _put_back(states: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
