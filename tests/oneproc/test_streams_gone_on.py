"""Streams: the same samples in any world, from any place, whatever the dataset can tell of it."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset

from elastic_ft.data import ElasticStream
from elastic_ft.data.draws import Draws
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.data.stream import TELL_EVERY_STEPS, SampleStream
from elastic_ft.errors import ConfigError, DataError
from elastic_ft.training.loader import collated

GLOBAL, MICRO = 16, 2


class Plain(IterableDataset):
    """Numbers, and how often they were read; neither shards nor state."""

    def __init__(self, count: int | None) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count() if self.count is None else range(self.count):
            self.read += 1
            yield number


class Placed(Plain):
    """It can be gone on with, as torch's stateful datasets can."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        first, self.at = self.at, 0
        for number in range(first, self.count or 1 << 30):
            self.read += 1
            self.at = number + 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbers(shard: list[int]) -> Iterator[dict[str, int]]:
    for first in shard:
        for number in range(first, first + 10 + first // 100):  # uneven
            yield {"number": number}


def hugging_face(shards: int = 8) -> Any:
    made = datasets.IterableDataset.from_generator(
        numbers, gen_kwargs={"shard": [100 * n for n in range(shards)]}
    )
    return made.filter(lambda x: x["number"] % 5).map(lambda x: {"double": 2 * x["number"]})


KINDS = {
    "plain": lambda: Plain(50),
    "endless": lambda: Plain(None),
    "placed": lambda: Placed(50),
    "hugging face": hugging_face,
    "shuffled": lambda: hugging_face().shuffle(seed=1, buffer_size=5).map(lambda x: x),
}


def make(dataset: Any, **changes: Any) -> ElasticStream:
    terms = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO} | changes
    return ElasticStream(dataset, **terms)


def steps(stream: ElasticStream, count: int) -> list[list[Any]]:
    batches = iter(stream)
    return [[next(batches) for _ in range(stream.micro_batches)] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [0, 7])
def test_any_world_reads_what_one_rank_would(kind: str, buffer: int) -> None:
    """Each step in another world of new readers, from the state of one rank before."""
    whole = steps(make(KINDS[kind](), shuffle_buffer=buffer, seed=4), 12)
    state = make(KINDS[kind](), shuffle_buffer=buffer, seed=4).state_dict()
    for step, world in enumerate((3, 3, 2, 4, 1, 8, 5, 3, 2, 1, 7, 3)):
        found = []
        for rank in range(world):
            stream = make(KINDS[kind](), shuffle_buffer=buffer, seed=4)
            stream.load_state_dict(json.loads(json.dumps(state)))
            stream.deal(rank, world)
            found += steps(stream, 1)[0]
            stream.commit()
            if rank == step % world:
                told = stream.state_dict()
        state = told
        assert found == whole[step]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_dropped_ends_what_it_reads(kind: str) -> None:
    """At once and here. Left to the garbage collector it ends in any thread: in one of Python's own
    pools, while that holds the lock which Hugging Face's stream needs to end its threads."""
    gc.collect()
    gc.disable()
    try:
        before = being_read()
        stream = make(KINDS[kind]())
        steps(stream, 2)
        assert being_read() > before
        del stream
        assert being_read() == before
    finally:
        gc.enable()


def being_read() -> int:
    """Generators of the datasets above that somebody holds."""
    files = (datasets.__path__[0], __file__)
    held = [x for x in gc.get_objects() if type(x) is GeneratorType]
    return sum(x.gi_code.co_filename.startswith(files) for x in held)


@pytest.mark.parametrize("buffer", [0, 6])
def test_each_sample_comes_once_a_pass_of_its_shard(buffer: int) -> None:
    """Eight files of uneven lengths, of a virtual shard each: each begins anew by itself."""
    read = Counter(
        sample["number"]
        for step in steps(make(hugging_face(), shuffle_buffer=buffer), 12)
        for micro in step
        for sample in micro
    )
    assert len(read) == len(list(hugging_face()))
    parts = {n: SampleStream(hugging_face(n), GLOBAL, MICRO).parts for n in (8, 12, 9, 64)}
    assert parts == {8: 8, 12: 4, 9: 1, 64: 8}
    for shard in range(8):
        times = {read[x["number"]] for x in hugging_face().shard(8, shard)}
        assert max(times) - min(times) <= 1 + bool(buffer)
    plain = [x for s in steps(make(Plain(48), shuffle_buffer=buffer), 3) for m in s for x in m]
    assert sorted(plain) == [*range(48)], "one shard: a pass has each sample once"
    assert (plain == [*range(48)]) is (buffer == 0)


@pytest.mark.parametrize(("kind", "most"), [("placed", 0), ("plain", 48), ("hugging face", 0)])
def test_a_new_reader_passes_over_little(kind: str, most: int) -> None:
    """With a state nothing but a step; without, no more than the pass so far."""
    stream = make(KINDS[kind]())
    for _ in steps(stream, 30):
        stream.commit()
    new = make(KINDS[kind]())
    new.load_state_dict(stream.state_dict())
    inner = new._stream  # what it reads is told nowhere else
    steps(new, 1)
    assert inner.reads <= most + 3 * GLOBAL


@pytest.mark.parametrize("kind", KINDS)
def test_marks_told_in_sums_bring_a_joiner_near(kind: str) -> None:
    world, terms = 3, (GLOBAL, MICRO)
    streams = [SampleStream(KINDS[kind](), *terms) for _ in range(world)]
    dealt = [range(0, 3), range(3, 6), range(6, 8)]
    for step in range(1, TELL_EVERY_STEPS + 1):
        for stream, numbers in zip(streams, dealt, strict=True):
            first = (step - 1) * GLOBAL
            for place in [p for n in numbers for p in (first + 2 * n, first + 2 * n + 1)]:
                assert stream[place] is not None
        told = [s.tell(step, n) for s, n in zip(streams, dealt, strict=True)]
        assert bool(told[0]) is (step == TELL_EVERY_STEPS)
    summed = [sum(parts) for parts in zip(*told, strict=True)]
    for stream in streams:
        stream.take(summed)
    states = [stream.state_dict() for stream in streams]
    assert states[0] == states[1] == states[2], "registered state is the same on all ranks"
    joiner = SampleStream(KINDS[kind](), *terms)
    joiner.load_state_dict(json.loads(json.dumps(states[0])))
    place = TELL_EVERY_STEPS * GLOBAL
    alone = SampleStream(KINDS[kind](), *terms)
    assert [joiner[p] for p in range(place, place + 4)] == [alone[p] for p in range(place + 4)][-4:]
    if kind in ("placed", "hugging face"):
        assert joiner.reads <= 3 * GLOBAL, joiner.reads


class Late(Placed):
    """As it is easily written: what it was left at is known only once it is asked for more."""

    def __iter__(self) -> Iterator[int]:
        while self.at < (self.count or 0):
            yield self.at
            self.at += 1
        self.at = 0


class Tidy(Placed):
    """Puts itself back, however it ends."""

    def __iter__(self) -> Iterator[int]:
        try:
            while self.at < (self.count or 0):
                self.at += 1
                yield self.at - 1
        finally:
            self.at = 0


@pytest.mark.filterwarnings("ignore:stream. state_dict")
@pytest.mark.parametrize("kind", [Late, Tidy])
def test_what_a_dataset_says_of_its_place_may_be_wrong(kind: type[Placed]) -> None:
    """Gone on with at a step, and with one that is read again from far behind."""
    whole = [list(range(50))[n % 50] for n in range(40 * GLOBAL)]
    stream = make(kind(50))
    for step in range(40):
        if step % 7 == 3:
            state, stream = json.loads(json.dumps(stream.state_dict())), make(kind(50))
            stream.load_state_dict(state)
        (found,) = steps(stream, 1)
        stream.commit()
        read = [number for micro in found for number in micro]
        assert read == whole[step * GLOBAL : (step + 1) * GLOBAL], step
    positions = SampleStream(kind(50), GLOBAL, MICRO)
    for first in (400, 350, 100, 300, 0):
        assert [positions[p] for p in range(first, first + 60)] == whole[first : first + 60]


def test_what_was_read_lately_is_not_read_again() -> None:
    """A re-deal of this step and the next: another rank's micro-batches, a little before."""
    dataset = Plain(None)
    stream = SampleStream(dataset, GLOBAL, MICRO)
    [stream[p] for p in range(30 * GLOBAL, 32 * GLOBAL)]
    before = dataset.read
    again = [stream[p] for p in range(29 * GLOBAL, 31 * GLOBAL)]
    assert again == [*range(29 * GLOBAL, 31 * GLOBAL)] and dataset.read == before


def test_what_a_collator_changes_stays_its_own() -> None:
    stream = SampleStream(hugging_face(), GLOBAL, MICRO)
    first = stream[0]
    first.pop("number")
    assert "number" in stream[0]


class Fails(Plain):
    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 20 and self.read < 25:
                raise OSError("the network is away")
            yield number


def test_a_stream_that_raised_is_gone_on_with() -> None:
    stream = SampleStream(Fails(None), GLOBAL, MICRO)
    with pytest.raises(OSError, match="away"):
        [stream[p] for p in range(24)]
    assert [stream[p] for p in range(24)] == [*range(24)]


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    terms = (GLOBAL, MICRO)
    with pytest.raises(ConfigError, match="split_dataset_by_node"):
        make(split_dataset_by_node(hugging_face(), 0, 3))
    with pytest.raises(ConfigError, match="a generator can be read once"):
        make(x for x in range(5))
    with pytest.raises(ConfigError, match="expected an iterable dataset, found int"):
        make(5)
    with pytest.raises(ConfigError, match="virtual shards for 4 micro-batches of 4"):
        make(hugging_face(), micro_batch_size=4).load_state_dict(make(Plain(5)).state_dict())
    with pytest.raises(DataError, match="virtual shard 0 of 1 has no samples in pass 0"):
        SampleStream(Plain(0), *terms)[0]
    with pytest.raises(ConfigError, match="shuffle_buffer: expected 0 or more, found -1"):
        make(Plain(5), shuffle_buffer=-1)


def test_a_collator_of_a_stream_may_draw() -> None:
    def masked(samples: list[int]) -> Any:
        return torch.rand(2) + torch.tensor(samples)

    found = []
    for wanted in ([[0, 1], [2, 3]], [[2, 3]]):
        stream = collated(SampleStream(Plain(None), 4, 2), masked)
        with Prefetcher(stream, draws=Draws(lambda: 7)) as prefetcher:
            prefetcher.request(1, wanted)
            found.append(prefetcher.get(1)[-1].data)
    assert torch.equal(*found)


class Slow(Plain):
    """Takes a while to be passed over."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            sum(range(20_000))  # some tenths of a millisecond
            yield number


def test_passing_over_is_progress() -> None:
    """It takes longer than a sample may; who waits is told, and may leave."""
    seen = []
    stream = SampleStream(Slow(None), 4, 2)
    with Prefetcher(collated(stream, list), reads=lambda: stream.reads) as prefetcher:
        prefetcher.request(1, [(4000, 4001)])
        assert prefetcher.get(1, 1.2, lambda: seen.append(stream.reads))[0].ids == (4000, 4001)
    print(f"told at {seen}")
