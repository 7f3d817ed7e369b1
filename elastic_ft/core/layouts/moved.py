"""What a change of layout moves, estimated: near-equal layouts are ordered by it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.layouts.work import ModelShape, Work, stage_layers


@dataclass(frozen=True, slots=True)
class Previous:
    """Where the state is now. ``ranks[d]``: the rank that device d had, None for a newcomer."""

    layout: Layout
    ranks: tuple[int | None, ...]


def bytes_moved(work: Work, layout: Layout, devices: Sequence[int], previous: Previous) -> int:
    """Estimates what devices lack of their new state: parameters and optimizer.

    ``devices``: the device of each rank of ``layout``.

    The state is taken as a unit cube of (depth, shard, tensor-parallel cut), of which each rank
    has a box; what a device had itself is not moved. Experts that are shared out before or after
    are a cube of their own, of (depth, experts, shard). The box planner counts exactly.
    """
    model = work.model
    shared = layout.shares_experts or previous.layout.shares_experts
    experts = model.layers * model.expert_parameters / model.parameters if shared else 0.0
    total = 0.0
    for of_experts, part in ((False, 1 - experts), (True, experts)):
        if part:
            before = _Boxes(model, previous.layout, of_experts)
            after = _Boxes(model, layout, of_experts)
            total += part * _volume_moved(before, after, devices, previous)
    return round(total * work.state_bytes)


def _volume_moved(
    before: _Boxes, after: _Boxes, devices: Sequence[int], previous: Previous
) -> float:
    total = 0.0
    overlaps: dict[tuple[ShardPlace, ShardPlace], float] = {}
    for rank, device in enumerate(devices):
        old = previous.ranks[device]
        total += after.volume(rank)
        if old is None:
            continue
        pair = after.cell(rank), before.cell(old)
        if pair not in overlaps:
            overlaps[pair] = _overlap(after.box(pair[0]), before.box(pair[1]))
        total -= overlaps[pair]
    return total


Interval = tuple[float, float]


class _Boxes:
    """Which part of a unit cube each rank of a layout holds."""

    def __init__(self, model: ModelShape, layout: Layout, of_experts: bool) -> None:
        self.layout, self.of_experts = layout, of_experts
        layers = stage_layers(model, layout.cuts[0])
        self.stops = [done / model.layers for done in accumulate(layers, initial=0)]

    def cell(self, rank: int) -> ShardPlace:
        return self.layout.place_of(rank)

    def box(self, cell: ShardPlace) -> tuple[Interval, ...]:
        """Layers are cut as stages have them, the rest evenly."""
        (stage, *inner), (_, *parts) = cell, self.layout.cuts
        if self.of_experts:
            ep, shards = self.layout.ep, self.layout.expert_shards
            inner, parts = [cell.dp_shard % ep, cell.dp_shard // ep], [ep, shards]
            if ep == 1:  # shards are experts, too
                inner, parts = inner[::-1], parts[::-1]
        even = ((i / n, (i + 1) / n) for i, n in zip(inner, parts, strict=True))
        return (self.stops[stage], self.stops[stage + 1]), *even

    def volume(self, rank: int) -> float:
        box = self.box(self.cell(rank))
        return _overlap(box, box)


def _overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    volume = 1.0
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        volume *= max(0.0, min(a_stop, b_stop) - max(a_start, b_start))
    return volume
