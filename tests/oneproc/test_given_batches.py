"""What a user's function is given of a micro-batch: on the device, and its own."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding

from elastic_ft.engines.base import MicroBatch
from elastic_ft.errors import ConfigError
from elastic_ft.training.batch import Batch, weighed
from elastic_ft.transformers.samples import Samples, collated_alike

Pair = namedtuple("Pair", "x y")


class Graph:
    """A batch that knows how it is moved."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


def parts(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, Graph):
        return [data.x]
    if isinstance(data, PackedSequence):
        return [data.data]
    values = data.values() if hasattr(data, "values") else data
    return [tensor for value in values for tensor in parts(value)]


MADE = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x, "more": [x, (x,)]},
    "named": lambda x: Pair(x, {"y": x}),
    "encoding": lambda x: BatchEncoding({"input_ids": x}),
    "packed": lambda x: pack_sequence([x]),
    "graph": Graph,
}


def test_a_batch_that_is_given_to_a_module_says_what_it_is() -> None:
    """Of the prepared loader, in a pass that trains nothing; the module said "must be Tensor"."""
    dealt: Any = SimpleNamespace(running=SimpleNamespace(number=1, micro_batches=[]))
    batch, model = Batch(SimpleNamespace(), dealt), torch.nn.Linear(3, 1)  # type: ignore[arg-type]
    passes: list[Callable[[Any], Any]] = [model, torch.relu, torch.nn.Embedding(3, 3), torch.sum]
    for module in passes:
        with pytest.raises(
            ConfigError, match=r"this rank's micro-batches .* a DataLoader of its own"
        ):
            module(batch)


def given(data: Any, device: str) -> Any:
    engine: Any = SimpleNamespace(device=torch.device(device))
    return weighed(MicroBatch(0, data, 1.0), engine)


@pytest.mark.parametrize("kind", MADE)
def test_a_batch_of_any_kind_is_moved(kind: str) -> None:
    """A tokenizer's is no dict, and stayed where it was; a named tuple could not be made."""
    data = MADE[kind](torch.ones(3))
    found = given(data, "meta")  # any that is not the host
    assert all(tensor.is_meta for tensor in parts(found))
    assert not any(tensor.is_meta for tensor in parts(data))
    assert kind != "named" or (type(found) is Pair and found.x.is_meta)
    assert kind != "encoding" or found.input_ids.is_meta


@pytest.mark.parametrize("kind", [k for k in MADE if k != "graph"])
def test_what_a_step_does_to_its_batch_is_not_there_when_it_is_made_again(kind: str) -> None:
    data = MADE[kind](torch.ones(3))
    before = copy.deepcopy(parts(data))
    for tensor in parts(given(data, "cpu")):
        tensor.mul_(0.5)
    assert all(map(torch.equal, parts(given(data, "cpu")), before))


@pytest.mark.parametrize("seed", [7, None])
def test_a_collator_may_change_the_samples_of_a_step_that_is_made_again(seed: int | None) -> None:
    def taking_labels_out(samples: list[dict[str, int]]) -> tuple[list[int], list[dict[str, int]]]:
        return [sample.pop("label") for sample in samples], samples

    micro_batch = MicroBatch(0, Samples([{"x": 1, "label": 2}, {"x": 3, "label": 4}]))
    first = collated_alike(micro_batch, taking_labels_out, seed, 1)
    assert first == ([2, 4], [{"x": 1}, {"x": 3}])
    assert collated_alike(micro_batch, taking_labels_out, seed, 1) == first
