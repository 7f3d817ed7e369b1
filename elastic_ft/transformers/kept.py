"""What TRL's trainers keep of micro-batches until they log it, of all ranks.

Lists of numbers by name, for training and for evaluation. Which names a micro-batch adds to is its
own matter (rewards of what is chosen, where any is), so ranks have different ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from elastic_ft.training.context import Context

TOKENS, METRICS = "_total_train_tokens", "_metrics"
TOTAL = "num_tokens"  # no list of terms: the total itself
Values = dict[str, list[float]]


class Kept:
    """Of a trainer; empty if it keeps nothing.

    Attributes:
        tokens: it has trained on, or None if it does not count them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def of(self, mode: str) -> dict[str, list[Any]]:
        """The lists themselves, of "train" or "eval"."""
        found: dict[str, list[Any]] = getattr(self._trainer, METRICS, {}).get(mode, {})
        return found

    def copy(self, mode: str) -> dict[str, list[Any]]:
        """In the order of names: the same on all ranks, whoever had a name first."""
        return {name: list(values) for name, values in sorted(self.of(mode).items())}

    def put_back(self, mode: str, values: Mapping[str, list[Any]]) -> None:
        kept = self.of(mode)
        kept.clear()
        for name, items in values.items():
            kept[name] = list(items)

    @property
    def tokens(self) -> float | None:
        return getattr(self._trainer, TOKENS, None)

    @tokens.setter
    def tokens(self, value: float) -> None:
        setattr(self._trainer, TOKENS, value)

    # ------------------------------------------------------------------------------ a step

    def begin(self) -> Before:
        return Before({n: len(v) for n, v in self.of("train").items()}, self.tokens)

    def take(self, before: Before) -> Values:
        """What has come since ``before``, which is taken out again, as are the tokens."""
        kept, taken = self.of("train"), dict[str, list[float]]()
        for name in list(kept):
            count = before.counts.get(name, 0)
            taken[name] = [float(value) for value in kept[name][count:]] if name != TOTAL else []
            del kept[name][count:]
            if not kept[name]:
                del kept[name]  # its mean would be that of nothing
        if self.tokens is not None and before.tokens is not None:
            taken[TOTAL] = [float(self.tokens - before.tokens)]
            self.tokens = before.tokens
        return {name: values for name, values in taken.items() if values}

    def add(self, values: Values) -> None:
        """Of a step that is made, from all ranks."""
        kept = self.of("train")
        for name, items in values.items():
            if name != TOTAL:
                kept.setdefault(name, []).extend(items)
            elif self.tokens is not None:
                self.tokens = type(self.tokens)(self.tokens + sum(items))
                kept[TOTAL] = [self.tokens]


class Before:
    """Attributes:
    counts: of values, by name. tokens: as ``Kept``'s.
    """

    def __init__(self, counts: dict[str, int], tokens: float | None) -> None:
        self.counts, self.tokens = counts, tokens


def by_micro_batch(by_number: Mapping[int, Values]) -> Values:
    """Micro-batches' values, in the order of their numbers."""
    merged: Values = {}
    for _, values in sorted(by_number.items()):
        for name, items in values.items():
            merged.setdefault(name, []).extend(items)
    return merged


def from_all(own: Mapping[int, Values], context: Context, sizes: list[float]) -> dict[int, Values]:
    """Every rank's, by numbers of micro-batches. A collective.

    ``sizes``: of what each rank ``packed``, in bytes.
    """
    if context.world_size == 1 or not any(sizes):
        return dict(own)
    mine = torch.frombuffer(bytearray(packed(own)), dtype=torch.uint8)
    longest = int(max(sizes))
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    gathered = padded.new_empty(context.world_size, longest)
    dist.all_gather(list(gathered.unbind()), padded)
    found: dict[int, Values] = {}
    for row, size in zip(gathered, sizes, strict=True):
        body = row[: int(size)].numpy().tobytes()
        found |= msgpack.unpackb(body, strict_map_key=False) if body else {}
    return found


def packed(values: Mapping[int, Values]) -> bytes:
    return bytes(msgpack.packb(dict(values)))
