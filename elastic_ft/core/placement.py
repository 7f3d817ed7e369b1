"""Who has which part of the state, said in a few words. Pure.

What a rank has follows from three things: which tensors there are, how each is cut, and the rank's
place in the layout. The first two are a ``Listing``, the same for most ranks; so it is sent once,
and everyone computes everybody's boxes (``boxes_of``). A box that no such cut explains, as those of
DeepSpeed's flat partitions, is listed itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from operator import itemgetter

from elastic_ft.core.layouts.expert_owners import expert_place, experts_at, part_of, runs_of
from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.sharding import Box, Holders, Replicas


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which axis a tensor is cut in equal chunks, the last ones shorter: by tensor
    parallelism, and what that leaves by shards. None: not at all.

    Experts, if they are shared out, are cut along ``ep`` by that, and what it leaves by shards: a
    box for each run of them that a rank has.
    """

    tp: int | None
    shard: int | None
    ep: int | None = None

    def boxes(self, shape: tuple[int, ...], layout: Layout, place: ShardPlace) -> tuple[Box, ...]:
        """In order; an empty one where nothing is left."""
        by_tp, index, shards = (self.tp, place.tp, layout.tp), place.dp_shard, layout.state_shards
        if self.ep is None:
            return (_evenly(shape, by_tp, (self.shard, index, shards)),)
        index, rank = expert_place(layout, place)
        shards, of_experts = layout.expert_shards, self.shard == self.ep
        if len(layout.owners) != shape[self.ep]:  # in runs
            by_ep = (self.ep, rank, layout.ep)
            return (_evenly(shape, by_tp, by_ep, (self.shard, index, shards)),)
        box = _evenly(shape, by_tp, (None if of_experts else self.shard, index, shards))
        experts = experts_at(layout, shape[self.ep], rank)
        runs = runs_of(part_of(experts, index, shards) if of_experts else experts)
        return tuple(
            Box(_put(box.offsets, self.ep, first), _put(box.sizes, self.ep, count))
            for first, count in runs or [(shape[self.ep], 0)]
        )


def _evenly(shape: tuple[int, ...], *cuts: tuple[int | None, int, int]) -> Box:
    """``cuts``: along which axis, which part, of how many."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, index, count in cuts:
        if axis is not None:
            chunk = -(-sizes[axis] // count)
            first = min(index * chunk, sizes[axis])
            offsets[axis] += first
            sizes[axis] = min(chunk, sizes[axis] - first)
            if not sizes[axis]:  # where torch has an empty one
                offsets[axis] = shape[axis]
    return Box(tuple(offsets), tuple(sizes))


def _put(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return *values[:axis], value, *values[axis + 1 :]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors of one rank may have in common. ``cut``: or the box itself."""

    dtype: str
    itemsize: int  # bytes per element
    shape: tuple[int, ...]
    cut: Cut | Box

    def boxes(self, layout: Layout, place: ShardPlace) -> tuple[Box, ...]:
        if isinstance(self.cut, Box):
            return (self.cut,)
        return self.cut.boxes(self.shape, layout, place)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a rank has: tensors, each with the number of its kind. Of one it may have several boxes.

    Ranks with equal listings differ in their place alone.
    """

    kinds: tuple[TensorKind, ...]
    tensors: tuple[tuple[str, int], ...]

    def boxes_of(self, layout: Layout, place: ShardPlace) -> Iterator[tuple[str, TensorKind, Box]]:
        """What the rank at ``place`` has. Raises IndexError where a tensor is of no kind."""
        boxes = [kind.boxes(layout, place) for kind in self.kinds]
        for name, number in self.tensors:
            for box in boxes[number]:
                yield name, self.kinds[number], box


@dataclass(frozen=True, slots=True)
class HolderPart:
    """One holder's part: a listing, and where in which layout the holder is."""

    holder: str
    listing: Listing
    layout: Layout
    place: ShardPlace

    def boxes(self) -> Iterator[tuple[str, TensorKind, Box]]:
        return self.listing.boxes_of(self.layout, self.place)


def list_parts(
    parts: Iterable[tuple[str, str, int, tuple[int, ...], Box]], layout: Layout, place: ShardPlace
) -> Listing:
    """The listing of a rank that has ``parts``: name, dtype, bytes per element, shape, box."""
    numbers: dict[TensorKind, int] = {}
    known: dict[tuple[tuple[int, ...], tuple[Box, ...]], Cut | None] = {}
    tensors: list[tuple[str, int]] = []
    for (name, dtype, itemsize, shape), some in groupby(parts, itemgetter(slice(4))):
        boxes = tuple(part[4] for part in some)
        if (shape, boxes) not in known:
            known[shape, boxes] = find_cut(shape, boxes, layout, place)
        cut = known[shape, boxes]
        for how in boxes if cut is None else (cut,):
            kind = TensorKind(dtype, itemsize, shape, how)
            tensors.append((name, numbers.setdefault(kind, len(numbers))))
    return Listing(tuple(numbers), tuple(tensors))


def find_cut(
    shape: tuple[int, ...], boxes: tuple[Box, ...], layout: Layout, place: ShardPlace
) -> Cut | None:
    """The simplest cut by which ``boxes`` are what ``place`` gets; None if there is none.

    Where several are, it does not matter which: whoever lists the same one has checked it too.
    """
    axes = (None, *range(len(shape)))
    by_tp = axes if layout.cuts_layers else (None,)
    by_shard = axes if layout.state_shards > 1 else (None,)
    by_ep = (None, 0) if layout.shares_experts and shape else (None,)
    for ep, tp, shard in product(by_ep, by_tp, by_shard):
        cut = Cut(tp, shard, ep)
        if cut.boxes(shape, layout, place) == boxes:
            return cut
    return None


def place_parts(parts: Iterable[HolderPart]) -> dict[str, Replicas]:
    """Who has which box of each tensor; of those that are cut alike, one object. No empty ones."""
    listings: dict[int, Listing] = {}
    holders: dict[tuple[int, Layout], dict[ShardPlace, list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for part in parts:
        listings[id(part.listing)] = part.listing
        holders[id(part.listing), part.layout][part.place].append(part.holder)
    of_tensor: dict[str, list[tuple[int, Layout, int]]] = defaultdict(list)
    for number, layout in holders:
        for name, kind in listings[number].tensors:
            of_tensor[name].append((number, layout, kind))
    known: dict[tuple[tuple[int, Layout, int], ...], Replicas] = {}
    found: dict[str, Replicas] = {}
    for name, kinds in of_tensor.items():
        alike = tuple(kinds)
        if alike not in known:
            known[alike] = _replicas(
                (box, who)
                for number, layout, kind in alike
                for place, who in holders[number, layout].items()
                for box in listings[number].kinds[kind].boxes(layout, place)
            )
        if known[alike]:
            found[name] = known[alike]
    return found


def _replicas(boxes: Iterable[tuple[Box, list[str]]]) -> dict[Box, Holders]:
    found: dict[Box, set[str]] = defaultdict(set)
    for box, who in boxes:
        if 0 not in box.sizes:
            found[box].update(who)
    return {box: tuple(sorted(who)) for box, who in found.items()}
