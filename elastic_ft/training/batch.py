"""What a user's loop is given for a step, and what it gets back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.modules import to_device
from elastic_ft.engines.own import OwnEngine
from elastic_ft.errors import ConfigError
from elastic_ft.worker.steering import Dealt
from elastic_ft.worker.step import Step

NO_MICRO_BATCH = (
    "a batch: is this rank's micro-batches of one step: go over them, `for micro in batch:`, in "
    "the function that @ctx.step decorates, and take what a DataLoader would give from `micro`"
)


class WeighedDict(dict[Any, Any]):
    weight = 1.0


class WeighedTuple(tuple[Any, ...]):
    weight = 1.0


class WeighedList(list[Any]):
    weight = 1.0


class Batch:
    """This rank's micro-batches of one step; iterate over it once, in the step's function.

    Each micro-batch is what the collate function made, on ``ctx.device``, with ``weight``: 0 is
    padding, which has no effect on anything, and 1 is not.

    Attributes:
        number: of the step, from 1.
        weight: of the micro-batch that was given last.
    """

    def __init__(self, engine: OwnEngine, dealt: Dealt) -> None:
        self.number, self.weight = dealt.running.number, 1.0
        self.dealt, self._engine = dealt, engine

    def __len__(self) -> int:
        return len(self.dealt.running.micro_batches)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{NO_MICRO_BATCH}; it has no {name}")

    @classmethod
    def __torch_function__(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a batch that was given to a module, as if it were a tensor. Raises ConfigError."""
        raise ConfigError(
            f"{NO_MICRO_BATCH}; a pass that trains nothing (update_bn) goes over a DataLoader of "
            "its own"
        )

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError(f"{NO_MICRO_BATCH}; it has no [{index!r}]")

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in self._engine.micro_batches(self.dealt.running):
            self.weight = micro_batch.weight
            yield weighed(micro_batch, self._engine)


def weighed(micro_batch: MicroBatch, engine: OwnEngine) -> Any:
    """Its data on the engine's device, with ``weight`` wherever that can be. Copied: what the
    user's code does to it in place is not there where the step is made again."""
    data = to_device(micro_batch.data, engine.device, copied=True)
    if type(data) is dict:
        data = WeighedDict(data)
    elif type(data) is list:
        data = WeighedList(data)
    elif type(data) is tuple:
        data = WeighedTuple(data)
    with contextlib.suppress(AttributeError, TypeError):  # then the batch has it
        data.weight = micro_batch.weight
    return data


class StepAttempt:
    """Attributes:
    batch: to be iterated over.
    step: once it is made; None if the world broke under it.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.step = batch, cast("Step | None", None)
