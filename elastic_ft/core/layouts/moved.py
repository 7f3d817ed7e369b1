"""What a change of layout moves, estimated: near-equal layouts are ordered by it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from elastic_ft.core.layouts.expert_owners import (
    allot,
    expert_place,
    experts_at,
    runs_of,
    weigh,
    with_owners,
)
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
    are a cube of their own, of (depth, experts, shard), dealt as a new generation would deal them.
    The box planner counts exactly.
    """
    model = work.model
    shared = model.experts and (layout.shares_experts or previous.layout.shares_experts)
    experts = model.layers * model.expert_parameters / model.parameters if shared else 0.0
    if shared and layout.shares_experts:
        layout = _dealt(model, layout, devices, previous)
    total = 0.0
    for of_experts, part in ((False, 1 - experts), (True, experts)):
        if part:
            before = _Boxes(model, previous.layout, of_experts)
            after = _Boxes(model, layout, of_experts)
            total += part * _volume_moved(before, after, devices, previous)
    return round(total * work.state_bytes)


def _dealt(model: ModelShape, layout: Layout, devices: Sequence[int], previous: Previous) -> Layout:
    old = ((rank, previous.ranks[device]) for rank, device in enumerate(devices))
    held = [(rank, previous.layout.place_of(was), True) for rank, was in old if was is not None]
    return with_owners(layout, allot(weigh(model.experts, layout, previous.layout, held)))


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
Axis = Sequence[Interval]  # of it, disjoint ones


class _Boxes:
    """Which part of a unit cube each rank of a layout holds."""

    def __init__(self, model: ModelShape, layout: Layout, of_experts: bool) -> None:
        self.layout, self.of_experts = layout, of_experts
        layers = stage_layers(model, layout.cuts[0])
        self.stops = [done / model.layers for done in accumulate(layers, initial=0)]
        self._experts = model.experts

    def cell(self, rank: int) -> ShardPlace:
        return self.layout.place_of(rank)

    def box(self, cell: ShardPlace) -> tuple[Axis, Axis, Axis]:
        """Layers are cut as stages have them, experts as ranks share them out, the rest evenly."""
        (stage, *inner), (_, *parts) = cell, self.layout.cuts
        depth = ((self.stops[stage], self.stops[stage + 1]),)
        first, second = ([(i / n, (i + 1) / n)] for i, n in zip(inner, parts, strict=True))
        if not (self.of_experts and self.layout.shares_experts):  # else shards are experts, too
            return depth, first, second
        shard, rank = expert_place(self.layout, cell)
        shards, count = self.layout.expert_shards, self._experts
        runs = runs_of(experts_at(self.layout, count, rank))
        own = [(run / count, (run + size) / count) for run, size in runs]
        return depth, own, ((shard / shards, (shard + 1) / shards),)

    def volume(self, rank: int) -> float:
        box = self.box(self.cell(rank))
        return _overlap(box, box)


def _overlap(a: Iterable[Axis], b: Iterable[Axis]) -> float:
    volume = 1.0
    for some, others in zip(a, b, strict=True):
        pairs = product(some, others)
        volume *= sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in pairs)
    return volume
