"""Streams: any world reads the same samples, each once, whoever reads and from wherever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic_ft.config.trained import BatchConfig
from elastic_ft.core.batches import ENDLESS, InOrder, deal, step_batch
from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.data.stream import SampleStream
from elastic_ft.errors import ConfigError, DataError
from elastic_ft.training.loader import Loader, bundle_of, check_options

BATCH = SimpleNamespace(global_batch_size=8, micro_batch_size=2)


class Counted(IterableDataset[int]):
    """0, 1, ... ``length``, shuffled in a buffer if ``drawn``; notes how far it was read."""

    def __init__(self, length: int, drawn: bool = False) -> None:
        self.length, self.drawn, self.read, self.epochs = length, drawn, 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for value in range(self.length):
            self.read += 1
            if not self.drawn:
                yield value
                continue
            buffer.append(value)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        yield from buffer


def hugging_face(files: int) -> Any:
    def examples(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            yield from ({"x": shard * 100 + i} for i in range(10))

    return datasets.IterableDataset.from_generator(
        examples, gen_kwargs={"shards": list(range(files))}
    )


def read(stream: Any, worlds: list[int]) -> list[list[Any]]:
    """Each step's samples in data order: of world ``worlds[i]`` with new readers in step i + 1,
    where that is another one than before."""
    steps, readers = [], []
    for step, world in enumerate(worlds, 1):
        if len(readers) != world:
            readers = [stream() for _ in range(world)]
        samples: list[Any] = []
        for reader, dealt in zip(readers, deal(4, world), strict=True):
            for ids in step_batch(InOrder(ENDLESS), step, 8, 2, dealt):
                samples += [reader[index] for index in ids]
        steps.append(samples)
    return steps


@pytest.mark.parametrize("files", [1, 3, 4, 8])
def test_every_world_reads_the_same(files: int) -> None:
    def stream() -> SampleStream:
        return SampleStream(hugging_face(files), 8, 2)

    assert stream().parts == (4 if files % 4 == 0 else 1)
    alone = read(stream, [1] * 7)
    assert read(stream, [3, 2, 2, 4, 1, 3, 3]) == alone
    first = [sample["x"] for step in alone for sample in step][: files * 10 // 8 * 8]
    assert len(set(first)) == len(first)  # one pass: nothing twice


def test_a_part_is_read_by_those_it_is_dealt_to() -> None:
    stream = SampleStream(hugging_face(8), 8, 2)
    samples = [stream[index] for step in range(5) for index in (step * 8 + 2, step * 8 + 3)]
    assert [s["x"] for s in samples] == [200 + i for i in range(10)]
    assert list(stream._cursors) == [1]


def test_it_begins_anew_where_it_ends() -> None:
    counted = Counted(11)
    stream = SampleStream(counted, 8, 2)
    assert [stream[i] for i in range(50)] == [i % 11 for i in range(50)]
    assert counted.epochs == [0, 1, 2, 3, 4]
    assert [stream[i] for i in range(25, 50)] == [i % 11 for i in range(25, 50)]  # still there
    assert counted.read == 50
    assert stream[0] == 0 and counted.read == 51  # from the beginning again
    with pytest.raises(DataError, match="no samples"):
        SampleStream(Counted(0), 8, 2)[0]


def drawn_by(world: int, rank: int, steps: int) -> list[list[int]]:
    """What a rank reads of a stream that shuffles with the global generator."""
    random.seed(f"{world} {rank}")  # where its training has left it
    bundle = bundle_of(Counted(1000, drawn=True), list, BATCH)  # type: ignore[arg-type]
    found = []
    with Prefetcher(bundle.train, draws=Draws(lambda: 7)) as prefetcher:
        for step in range(1, steps + 1):
            share = step_batch(InOrder(ENDLESS), step, 8, 2, deal(4, world)[rank])
            prefetcher.request(step, share)
            found.append([x for loaded in prefetcher.get(step) for x in loaded.data])
    return found


def test_draws_of_a_stream_are_the_same_in_every_world() -> None:
    alone = drawn_by(1, 0, 5)
    in_order = [x for step in alone for x in step]
    assert sorted(in_order) != in_order
    parts = [drawn_by(3, rank, 5) for rank in range(3)]
    assert [[x for part in parts for x in part[step]] for step in range(5)] == alone


def test_what_a_loader_of_a_stream_is() -> None:
    sizes = BatchConfig(global_batch_size=4, micro_batch_size=2)
    check_options(DataLoader(Counted(9), batch_size=2), sizes)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        check_options(DataLoader(Counted(9), batch_size=3), sizes)
    context = SimpleNamespace(job=SimpleNamespace(batch=BATCH))
    loader = Loader(context, bundle_of(Counted(9), None, BATCH))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert loader.bundle.description == "a stream of samples"
    assert torch.equal(loader.bundle.train.collate([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="found int"):
        bundle_of(3, None, BATCH)  # type: ignore[arg-type]
