"""Processes that read samples, and what a script sets on its dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from elastic_ft.data.prefetch import Loaded, Prefetcher
from elastic_ft.data.reading_processes import ReadingProcesses
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
        prefetcher.renew()
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
