"""Streams alone, for whoever has a loop, processes and recovery of his own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ft.core.batches import deal
from elastic_ft.data.sampler import expect_terms
from elastic_ft.data.stream import SampleStream
from elastic_ft.errors import ConfigError


class ElasticStream:
    """This rank's micro-batches of a stream, lists of samples, from the one after ``step`` on.

        stream = ElasticStream(dataset, global_batch_size=64, micro_batch_size=4, seed=0)
        stream.deal(rank, world_size)                # again, whenever the world is another
        batches = iter(stream)
        for _ in range(stream.micro_batches):        # of a step; ranks may have one more or less
            micro = collate(next(batches))
        stream.commit()                              # with the optimizer's step

    Make the iterator anew after ``deal`` and ``load_state_dict``. Any rank's state does for all:
    where it knows of no place near in a virtual shard, that is read from the beginning of its pass,
    or of the run.

    Args: as of ``SampleStream``.

    Attributes:
        step: that was committed last, 0 before the first.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        shuffle_buffer: int = 0,
    ) -> None:
        self._stream = SampleStream(
            dataset, global_batch_size, micro_batch_size, seed, shuffle_buffer
        )
        self._seed, self._micro = seed, micro_batch_size
        self._whole = global_batch_size // micro_batch_size
        self._dealt = range(self._whole)
        self.step = 0

    def deal(self, rank: int, world_size: int) -> None:
        """From the next iterator on, this rank's share is that of such a world."""
        if not 0 <= rank < world_size <= self._whole:
            raise ConfigError(
                f"rank {rank} of {world_size}: a step has {self._whole} micro-batches, one at "
                "least for each rank"
            )
        self._dealt = deal(self._whole, world_size)[rank]

    @property
    def micro_batches(self) -> int:
        """Of a step, on this rank."""
        return len(self._dealt)

    def __iter__(self) -> Iterator[list[Any]]:
        step = self.step
        while True:
            for number in self._dealt:
                first = (step * self._whole + number) * self._micro
                yield [self._stream[first + place] for place in range(self._micro)]
            step += 1

    def commit(self) -> None:
        """The step after ``step`` is made, on all ranks."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"step": self.step, "marks": self._stream.marks_at(self.step), **self._terms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where the samples would be others."""
        expect_terms(self._terms(), state)
        self._stream.load_state_dict({"marks": state["marks"]})
        self.step = int(state["step"])

    def _terms(self) -> dict[str, Any]:
        return {"seed": self._seed, "stream": self._stream.described}
