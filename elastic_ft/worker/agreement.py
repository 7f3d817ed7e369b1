"""What all members agree on in each step: sums over them, in one small collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_ft.engines.base import MicroBatch
from elastic_ft.groups.waits import WAITS

EXCHANGED_MAX = 4  # members


@dataclass(frozen=True, slots=True)
class Agreed:
    """Of one step, over all members."""

    loss: float  # mean per token
    tokens: int
    squares: float  # of the gradients' norm
    sample_ids: list[int]  # that were consumed; none are known without ``audit``
    more: Sequence[float] = ()  # whatever else was summed


@dataclass(frozen=True, slots=True)
class Contribution:
    """By one member, of one step.

    Attributes:
        more, positions: how many of the last ``values`` are other sums, and then places in a
            stream; after these come samples.
    """

    values: list[float]
    more: int
    positions: int


def sum_over_members(values: list[float], world_size: int) -> list[float]:
    """Returns their sums in float64, the same on each member of the default group.

    A collective of few numbers costs by its messages. Gloo's rings cut them in pieces, and pass
    them on: an all-reduce from each of 4 members in about 12 messages, an all-gather in 6. Told to
    each of the others at once it takes one for each, and two thirds of the processor's time; their
    number grows with the world instead.
    """
    if world_size == 1:
        return [float(value) for value in values]
    packed = torch.tensor(values, dtype=torch.float64, device="cpu")
    with WAITS.named("agreement"):
        if world_size > EXCHANGED_MAX:
            dist.all_reduce(packed)
            return packed.tolist()
        told = packed.repeat(world_size)
        everyones = torch.empty_like(told)
        dist.all_to_all_single(everyones, told)
    return everyones.view(world_size, -1).sum(0).tolist()


def places(
    micro_batches: list[MicroBatch], global_batch_size: int, micro_batch_size: int
) -> list[int]:
    """For each place in the global batch: 1 + the id of the sample that these micro-batches
    brought to it, as the loader read it, or 0. The sum over all members says which it was (I2)."""
    consumed = [0] * global_batch_size
    for micro_batch in micro_batches:
        if micro_batch.weight:
            first = micro_batch.number * micro_batch_size
            ids = [1 + sample for sample in micro_batch.ids]
            consumed[first : first + len(ids)] = ids
    return consumed
