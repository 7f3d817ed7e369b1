"""The state digest: independent of the layout that holds the state (DESIGN section 7)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from elastic_ft.core.sharding import Box
from elastic_ft.runtime.engines.base import State, StateTensor
from elastic_ft.runtime.groups import Groups
from elastic_ft.runtime.transfer import Boxes, move

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
    for names in _batches(state):
        wanted = {name: _whole(state[name]) for name in names} if groups.rank == 0 else {}
        offers = [Boxes(tuple(o for o in b.offers if o[0] in names), (), b.itemsizes) for b in held]
        needs = tuple((name, Box.whole(state[name].shape)) for name in names)
        offers[0] = Boxes(offers[0].offers, needs, offers[0].itemsizes)
        move(groups, offers, [{name: state[name] for name in names}], wanted)
        for name, tensor in wanted.items():
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(
                memoryview(tensor.local.contiguous().reshape(-1).view(torch.uint8).numpy())
            )
    return digest.hexdigest() if groups.rank == 0 else ""


def _whole(tensor: StateTensor) -> StateTensor:
    local = torch.empty(tensor.shape, dtype=tensor.local.dtype)
    return StateTensor(tensor.shape, Box.whole(tensor.shape), local)


def _batches(state: State) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in sorted(state):
        numel = torch.Size(state[name].shape).numel()
        nbytes = numel * state[name].local.element_size()
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch
