"""A stream (an iterable dataset) by position: sample p is the p-th that it yields.

Who reads a stream reads it from its beginning. So each worker goes through the whole of it, in the
one order that it has, and keeps what is dealt to it: any world reads the same samples, each once
(I2), also after a loss, for who joins, and after a restart, which goes to its place anew. A stream
that can be split by its files (Hugging Face's) is, into as many as a global batch has
micro-batches: then a worker reads the parts that its micro-batches come from, and no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ft.core.batches import ENDLESS
from elastic_ft.errors import DataError

STEPS_KEPT = 3  # a batch may be dealt anew, and two steps are read ahead


class SampleStream:
    """An iterable dataset as one that is asked for ``stream[p]``, p mostly growing.

    Where it ends it begins anew; ``set_epoch(n)`` is called before the n-th pass, from 0, if it has
    that. Each pass must yield the same samples in the same order, in every process: shuffling by
    a seed and the epoch is fine, by the clock is not.

    Args:
        dataset: ``iter(dataset)`` begins from the beginning. One with ``shard(num_shards, index)``
            and ``num_shards``, as Hugging Face's, is split where that goes into equal numbers of
            files.
        batch_size, micro_batch_size: in samples: of all workers in a step, and of what is dealt.

    Attributes:
        parts: how many the stream is split into; 1: it is not.
    """

    def __init__(self, dataset: Any, batch_size: int, micro_batch_size: int) -> None:
        self.dataset, self._batch, self._micro = dataset, batch_size, micro_batch_size
        self.parts = parts_of(dataset, batch_size // micro_batch_size)
        self._begin: Callable[[int], None] = lambda number: None
        self._cursors: dict[int, StreamReader] = {}

    def __len__(self) -> int:
        return ENDLESS

    def seeded_by(self, begin: Callable[[int], None]) -> None:
        """``begin(number)`` is called before each sample that is read, and before it is known which
        one that is, if any: the same number for the same one, whoever reads."""
        self._begin = begin

    def __getitem__(self, index: int) -> Any:
        """Raises DataError for a stream without samples."""
        if self.parts == 1:
            return self._cursor(0, self._batch).at(index)
        step, within = divmod(index, self._batch)
        part, place = divmod(within, self._micro)
        return self._cursor(part, self._micro).at(step * self._micro + place)

    def _cursor(self, part: int, per_step: int) -> StreamReader:
        if part not in self._cursors:
            source = self.dataset
            if self.parts > 1:
                source = source.shard(num_shards=self.parts, index=part)
            self._cursors[part] = StreamReader(
                source, per_step * STEPS_KEPT, lambda n: self._begin(n * self.parts + part)
            )
        return self._cursors[part]


class StreamReader:
    """The n-th sample of one iterable, pass after pass.

    ``kept``: of the last ones read, for who asks again.
    """

    def __init__(self, source: Any, kept: int, begin: Callable[[int], None]) -> None:
        self._source, self._begin = source, begin
        self._kept: deque[Any] = deque(maxlen=kept)
        self._restart()

    def _restart(self) -> None:
        self._next, self._passes = 0, 0
        self._kept.clear()
        self._samples = self._opened()

    def _opened(self) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._passes)
        return iter(self._source)

    def at(self, number: int) -> Any:
        if number < self._next - len(self._kept):
            self._restart()
        while self._next <= number:
            self._kept.append(self._read())
            self._next += 1
        return self._kept[number - self._next]

    def _read(self) -> Any:
        self._begin(self._next)
        for again in (False, True):
            for sample in self._samples:
                return sample
            if again:
                raise DataError("the stream has no samples")
            self._passes += 1
            self._samples = self._opened()
        raise AssertionError("not reached")


def parts_of(dataset: Any, micro_batches: int) -> int:
    """``micro_batches``, if the dataset splits into that many of as many files each; else 1."""
    files = getattr(dataset, "num_shards", 1)
    if not hasattr(dataset, "shard") or type(files) is not int:
        return 1
    return micro_batches if files and files % micro_batches == 0 else 1
