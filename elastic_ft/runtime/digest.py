"""The state digest: independent of the layout that holds the state (DESIGN section 7)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from elastic_ft.core.sharding import Box
from elastic_ft.runtime.engines.base import State, StateTensor, tensor_name
from elastic_ft.runtime.groups import Groups
from elastic_ft.runtime.transfer import Boxes, move

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype

BATCH_BYTES = 64 << 20  # of whole tensors gathered at a time


def state_digest(groups: Groups, state: State, boxes: list[Boxes]) -> str:
    """Returns, on rank 0, the sha256 over every tensor in its global form, by name; "" elsewhere.

    ``boxes``: what every participant holds, from the forming of this generation.
    """
    digest = hashlib.sha256()
    held = [
        Boxes(b.needs if rank < groups.world_size else (), (), b.itemsizes)
        for rank, b in enumerate(boxes)
    ]
    specs = _specs(groups, state)
    for names in _batches(specs):
        wanted = {name: _whole(*specs[name]) for name in names} if groups.rank == 0 else {}
        offers = [Boxes(tuple(o for o in b.offers if o[0] in names), (), b.itemsizes) for b in held]
        needs = tuple((name, Box.whole(specs[name][0])) for name in names)
        offers[0] = Boxes(offers[0].offers, needs, offers[0].itemsizes)
        own = {key: tensor for key, tensor in state.items() if tensor_name(key) in names}
        move(groups, offers, [own], wanted)
        for name, tensor in wanted.items():
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(
                memoryview(tensor.local.contiguous().reshape(-1).view(torch.uint8).numpy())
            )
    return digest.hexdigest() if groups.rank == 0 else ""


def _specs(groups: Groups, state: State) -> Specs:
    """Of every tensor of the whole state; a pipeline's ranks have some each."""
    own = {tensor_name(key): (tensor.shape, tensor.local.dtype) for key, tensor in state.items()}
    if groups.assignment.layout.pp == 1:
        return own
    everyone: list[Any] = [None] * groups.world_size
    dist.all_gather_object(everyone, own)
    return {name: spec for specs in everyone for name, spec in specs.items()}


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> StateTensor:
    return StateTensor(shape, Box.whole(shape), torch.empty(shape, dtype=dtype))


def _batches(specs: Specs) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, (shape, dtype) in sorted(specs.items()):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch
