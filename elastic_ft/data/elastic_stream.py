"""Streams alone, for whoever has a loop, processes and recovery of his own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ft.data.sampler import DealtSteps, expect_terms
from elastic_ft.data.stream import SampleStream


class ElasticStream(DealtSteps):
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
        super().__init__(global_batch_size // micro_batch_size)

    def __iter__(self) -> Iterator[list[Any]]:
        step = self.step
        while True:
            for number in self._dealt:
                first = (step * self._whole + number) * self._micro
                yield [self._stream[first + place] for place in range(self._micro)]
            step += 1

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
