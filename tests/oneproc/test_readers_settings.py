"""Processes that read samples, and what a script sets on its dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from elastic_ft.data.prefetch import Loaded, Prefetcher
from elastic_ft.data.reading_processes import ReadingProcesses
from elastic_ft.errors import DataError
from elastic_ft.training.loader import collated

DEADLINE_S = 120


class InFiles:
    """Ten samples a file, of which the one read last is kept; what they are multiplied by is set
    from outside."""

    def __init__(self) -> None:
        self.level = 1
        self.file, self.content = -1, torch.empty(0)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index // 10 != self.file:
            self.file = index // 10
            self.content = torch.arange(10.0) + 10 * self.file
        return self.content[index % 10] * self.level


@contextmanager
def reading(dataset: Any) -> Iterator[Prefetcher]:
    given = collated(dataset, None)
    processes = ReadingProcesses(given, 1, seed=7)
    with Prefetcher(given, others=processes) as made:
        yield made


def numbers(read: list[Loaded]) -> list[float]:
    return [float(x) for micro_batch in read for x in micro_batch.data]


@pytest.mark.parametrize("files", [(3, 0, 0), (0, 3, 0)])
def test_what_readers_keep_stays_theirs(files: tuple[int, ...]) -> None:
    """Only what the script has set is set there: the rest belongs to what they have open."""
    dataset = InFiles()
    assert float(dataset[4]) == 4.0, "a script looks at a sample before it trains"
    with reading(dataset) as prefetcher:
        prefetcher.request(1, [(50,)])
        assert numbers(prefetcher.get(1, DEADLINE_S)) == [50.0]
        dataset.level = 2
        assert prefetcher.renew()
        assert numbers(prefetcher.get(1, DEADLINE_S)) == [100.0]
        for step, file in enumerate(files, 2):
            prefetcher.request(step, [(10 * file + 5,)])
            assert numbers(prefetcher.get(step, DEADLINE_S)) == [2 * (10 * file + 5.0)]


def test_what_a_script_reads_itself_is_no_setting() -> None:
    """Of a dataset that is evaluated on, too (two halves of one): the readers' files are theirs."""
    dataset = InFiles()
    with reading(dataset) as prefetcher:
        prefetcher.request(1, [(50,)])
        prefetcher.get(1, DEADLINE_S)
        assert float(dataset[34]) == 34.0
        assert not prefetcher.renew(), "also for a process that has read nothing yet"
        prefetcher.request(2, [(35,)])
        assert numbers(prefetcher.get(2, DEADLINE_S)) == [35.0]


def test_what_is_set_before_the_first_batch_counts() -> None:
    """The processes were made by then: where a script goes on it sets its epoch, and begins."""
    dataset = InFiles()
    with reading(dataset) as prefetcher:
        dataset.level = 3
        prefetcher.request(1, [(50,)])
        prefetcher.get(1, DEADLINE_S)
        if prefetcher.renew():
            prefetcher.get(1, DEADLINE_S)
        prefetcher.request(2, [(51,)])
        assert numbers(prefetcher.get(2, DEADLINE_S)) == [153.0]


def twice(sample: torch.Tensor) -> torch.Tensor:
    return 2 * sample


class Times:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return self.by * sample


class Plus(Times):
    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return self.by + sample


class Transformed(InFiles):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        return sample if self.transform is None else self.transform(sample)


OTHERS = {
    "function": (twice, lambda sample: 3 * sample, 153),
    "class": (Times(2), Plus(3), 54),
    "none before": (None, twice, 102),
    "a function's arguments": (partial(torch.mul, other=2), partial(torch.mul, other=3), 153),
}


@pytest.mark.parametrize(("before", "then", "expected"), OTHERS.values(), ids=OTHERS)
def test_another_transform_counts_for_the_next_step(before: Any, then: Any, expected: int) -> None:
    dataset = Transformed(before)
    with Prefetcher(collated(dataset, None)) as prefetcher:
        prefetcher.request(1, [(51,)])
        prefetcher.get(1, DEADLINE_S)
        dataset.transform = then
        assert prefetcher.renew()
        assert numbers(prefetcher.get(1, DEADLINE_S)) == [expected]


@pytest.mark.parametrize(("before", "then", "expected"), OTHERS.values(), ids=OTHERS)
def test_processes_that_have_another_transform_read_nothing_by_it(
    before: Any, then: Any, expected: int
) -> None:
    """It can't be sent to them: values can."""
    dataset = Transformed(before)
    with reading(dataset) as prefetcher:
        prefetcher.request(1, [(51,)])
        prefetcher.get(1, DEADLINE_S)
        dataset.transform = then
        assert prefetcher.renew()
        with pytest.raises(DataError, match=r"dataset\.transform.* num_workers=0"):
            prefetcher.get(1, DEADLINE_S)


def test_no_transform_can_be_sent() -> None:
    dataset = Transformed(twice)
    with reading(dataset) as prefetcher:
        prefetcher.request(1, [(51,)])
        prefetcher.get(1, DEADLINE_S)
        dataset.transform = None
        assert prefetcher.renew()
        assert numbers(prefetcher.get(1, DEADLINE_S)) == [51.0]
