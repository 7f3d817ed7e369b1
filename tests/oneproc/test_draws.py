"""Datasets that draw from the global generators, beside a loop that does, too."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher

DEADLINE_S = 30.0


class Augmented:
    """``draw`` makes a sample; ``read`` holds the indices that were asked for."""

    def __init__(self, draw: Any) -> None:
        self._draw, self.read = draw, list[int]()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        self.read.append(index)
        return index + float(self._draw())

    def collate(self, samples: list[float]) -> torch.Tensor:
        return torch.tensor(samples, dtype=torch.float64)


DRAWS = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.random,
    "python": random.random,
}


def read(draw: Any, *deals: list[tuple[int, ...]]) -> tuple[Augmented, list[list[float]]]:
    """Of a step per deal, what each micro-batch has."""
    dataset = Augmented(draw)
    found = []
    with Prefetcher(dataset, draws=Draws(lambda: 7)) as prefetcher:
        for step, micro_batches in enumerate(deals, 1):
            prefetcher.request(step, micro_batches)
            found += [x.data.tolist() for x in prefetcher.get(step, DEADLINE_S)]
            prefetcher.request(step + 1, [(9,)])  # ahead
            prefetcher.cancel()
    return dataset, found


@pytest.mark.parametrize("kind", DRAWS)
def test_a_sample_is_the_same_in_every_world_and_no_step_is_disturbed(kind: str) -> None:
    torch.manual_seed(1)
    before = torch.default_generator.get_state()
    dataset, one = read(DRAWS[kind], [(1, 2), (3, 4)], [(1, 12), (5, 6)])
    assert torch.equal(torch.default_generator.get_state(), before)
    assert dataset.read == [1, 2, 3, 4, 1, 2, 5, 6], "read ahead, beside the step"
    _, other = read(DRAWS[kind], [(3, 4)], [(5, 6), (1, 12)])
    assert other == [one[1], one[3], one[2]]
    assert one[0][0] == one[2][0] and one[0][1] != one[2][1], "the same sample, another epoch"


def test_the_step_after_the_one_that_is_got_is_not_read_beside_it() -> None:
    """It was, if it was wanted by then: the reader was faster than who had waited for it."""
    ahead = threading.Event()

    class Watched(Augmented):
        def __getitem__(self, index: int) -> float:
            if index == 9:
                ahead.set()
            return super().__getitem__(index)

    dataset = Watched(lambda: torch.rand(()))
    with Prefetcher(dataset, draws=Draws(lambda: 7)) as prefetcher:
        prefetcher.request(1, [(1, 2), (3, 4)])
        prefetcher.request(2, [(9,)])
        prefetcher.get(1, DEADLINE_S)
        assert not ahead.wait(0.2)
        assert len(prefetcher.get(2, DEADLINE_S)) == 1


def test_who_draws_nothing_is_read_ahead() -> None:
    dataset = Augmented(lambda: 0.5)
    ahead = threading.Event()
    with Prefetcher(dataset, draws=Draws(lambda: 7)) as prefetcher:
        prefetcher.request(1, [(1,), (3,)])  # two, as it notes what is read
        prefetcher.get(1, DEADLINE_S)
        dataset._draw = lambda: ahead.set() or 0.5
        prefetcher.request(2, [(2,)])
        assert ahead.wait(DEADLINE_S)
