"""A dataset that is iterated over, opened at a virtual shard, a pass and a place in it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from elastic_ft.errors import ConfigError

TABLES = ("arrow", "pandas", "polars")  # formats whose state is a batch's, not a sample's


class StreamSource:
    """Attributes:
    shards_max: into which it can be cut; 1: each reader reads all of it.

    Raises ConfigError for what would be others' samples in another world, or after a restart.
    """

    def __init__(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        if not hasattr(dataset, "__iter__"):
            raise ConfigError(f"stream: expected an iterable dataset, found {kind}")
        if isinstance(dataset, Iterator):
            raise ConfigError(
                f"stream: a {kind} can be read once, and not from another place: give an object "
                "whose __iter__ begins anew"
            )
        self._dataset = dataset
        self._may_be_cut = callable(getattr(dataset, "shard", None)) and isinstance(
            getattr(dataset, "num_shards", None), int
        )
        self.shards_max: int = dataset.num_shards if self._may_be_cut else 1
        if getattr(dataset, "_distributed", None) is not None:  # Hugging Face's
            raise ConfigError(
                "stream: split_dataset_by_node: each rank is dealt its samples here: leave it out"
            )
        self._has_state = all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        if _has_inexact_state(dataset):
            self._has_state = False
        self._tells = self._has_state  # and its state is where it is
        self._initial: Any = None
        if self._has_state and not self._may_be_cut:
            self._initial = copy.deepcopy(dataset.state_dict())

    def begin(
        self, shards: int, number: int, passes: int, state: Any
    ) -> tuple[Iterator[Any], Callable[[], Any]]:
        """An iterator over virtual shard ``number`` in pass ``passes``, from 0, and what returns
        its state then. ``state``: where it begins; None: at the beginning."""
        dataset = self._dataset
        if self._may_be_cut:
            dataset = dataset.shard(num_shards=shards, index=number)
        # Hugging Face's is of its shuffling alone, and has it ignore states of another epoch.
        takes_epoch = not (self._has_state and hasattr(dataset, "_ex_iterable"))
        if takes_epoch and callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(passes)
        if not self._has_state:
            return iter(dataset), lambda: None
        if state is not None or not self._may_be_cut:
            dataset.load_state_dict(copy.deepcopy(self._initial if state is None else state))
        samples, state_now = iter(dataset), partial(self._state_of, dataset)
        return self._watched(samples, state_now, _bytes(state_now)), state_now

    def _state_of(self, dataset: Any) -> Any:
        return copy.deepcopy(dataset.state_dict()) if self._tells else None

    def _watched(
        self, samples: Iterator[Any], state: Callable[[], Any], before: bytes | None
    ) -> Iterator[Any]:
        """The samples. A state that the first of them does not change is not that after it: gone on
        from there, some would come again."""
        for sample in samples:
            if before is not None and self._tells and _bytes(state) == before:
                self._tells = False
                warnings.warn(
                    "stream: state_dict() is the same before and after a sample: it is not gone on "
                    "from there, but from the beginning of a pass; change it before `yield`",
                    stacklevel=2,
                )
            yield sample
            break
        yield from samples


def _bytes(state: Callable[[], Any]) -> bytes | None:
    """To be compared; None where there is none, or none that can be: a dataset may not know its
    state before it has given a sample."""
    try:
        return None if (found := state()) is None else pickle.dumps(found)
    except Exception:  # of a user's code, any
        return None


def _has_inexact_state(dataset: Any) -> bool:
    """What Hugging Face's streams say of themselves: a buffer of shuffled samples is lost, and of
    tables a batch may be skipped. Its names are private, and tests look at what they find."""
    if getattr(getattr(dataset, "_formatting", None), "format_type", None) in TABLES:
        return True
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False
