"""Streams that workers of these tests read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch

from tests.multiproc import tiny


class Plain(torch.utils.data.IterableDataset):
    """Neither shards nor state."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        held_back = tiny.Gated(range(100), self.gate)
        return (held_back[number] for number in range(100))


def numbers(shard: list[int], gate: Path) -> Iterator[dict[str, int]]:
    held_back = tiny.Gated(range(1000), gate)
    for first in shard:
        for number in range(first, first + 20 + first // 100):  # shards of uneven lengths
            yield {"number": held_back[number]}


def of_kind(kind: str, gate: Path) -> Any:
    if kind == "plain":
        return Plain(gate)
    shards = [100 * n for n in range(8)]
    made = datasets.IterableDataset.from_generator(
        numbers, gen_kwargs={"shard": shards, "gate": gate}
    )
    return made
