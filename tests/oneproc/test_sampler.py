"""The order of samples alone, and mixtures: in any world, with any loader."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from torch.utils.data import DataLoader

from elastic_ft.data import ElasticSampler, Mixture
from elastic_ft.errors import ConfigError

SAMPLES, GLOBAL, MICRO = 96, 16, 2


def make(**changes: int) -> ElasticSampler:
    values = {"samples": SAMPLES, "global_batch_size": GLOBAL, "micro_batch_size": MICRO} | changes
    return ElasticSampler(values.pop("samples"), **values)


def one_step(sampler: ElasticSampler, workers: int = 0) -> list[int]:
    """What this rank reads of the next step, through a loader that reads ahead."""
    loader = iter(DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=workers))
    return [i for _ in range(sampler.micro_batches) for i in next(loader).tolist()]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_is_read_once_an_epoch_whatever_the_worlds(workers: int) -> None:
    state, read = make().state_dict(), []
    for world in (3, 3, 2, 4, 1, 8):  # an epoch; each step in another world, of new processes
        step = []
        for rank in range(world):
            sampler = make()
            sampler.load_state_dict(state)
            sampler.deal(rank, world)
            step += one_step(sampler, workers if rank == 0 else 0)
            sampler.commit()
        read.append(step)
        state = sampler.state_dict()
    assert sorted(i for step in read for i in step) == [*range(SAMPLES)]
    alone = make()
    for step in read:
        assert step == [i for micro in alone.of_step(alone.step + 1) for i in micro]
        alone.commit()
    assert alone.epoch() == 1


def test_a_step_that_was_not_committed_is_read_again() -> None:
    sampler = make(steps=2)
    first = one_step(sampler)
    assert one_step(sampler) == first
    sampler.commit()
    assert set(one_step(sampler)).isdisjoint(first)
    sampler.commit()
    assert [*sampler] == []


def test_another_order_is_refused_by_name() -> None:
    state = make().state_dict()
    with pytest.raises(ConfigError, match="seed: the state is of a run with 0, this one has 1"):
        make(seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="9 ranks have no micro-batch each of the 8"):
        make().deal(8, 9)
    with pytest.raises(ConfigError, match="16 is no multiple of micro_batch_size, 3"):
        make(micro_batch_size=3)


def test_a_mixture_has_its_proportions_in_every_block() -> None:
    sizes, weights = (100, 10, 35), (7, 2, 1)
    datasets = [[(n, i) for i in range(size)] for n, size in enumerate(sizes)]
    mixture = Mixture(datasets, weights)
    assert len(mixture) == 350  # the third is the longest for its weight
    whole = [mixture[i] for i in range(len(mixture))]
    for first in range(0, len(whole), 10):
        assert Counter(n for n, _ in whole[first : first + 10]) == {0: 7, 1: 2, 2: 1}
    for number, size in enumerate(sizes):
        times = Counter(i for n, i in whole if n == number)
        assert len(times) == size and max(times.values()) - min(times.values()) <= 1
    with pytest.raises(ConfigError, match=r"expected whole numbers from 1 on, found 0\.5"):
        Mixture(datasets, (0.5, 1, 1))  # type: ignore[arg-type]


def test_they_need_nothing_but_python() -> None:
    program = (
        "import sys, elastic_ft.data\n"
        "print(*{'torch', 'numpy', 'ray', 'pydantic'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == []
