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
from itertools import product

from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.sharding import Box, Holders, Replicas


@dataclass(frozen=True, slots=True)
class Cut:
    """Along which axis a tensor is cut in equal chunks, the last ones shorter: by tensor
    parallelism, and what that leaves by shards. None: not at all.

    Experts, if they are shared out, are cut along ``ep`` by that, and what it leaves by shards.
    """

    tp: int | None
    shard: int | None
    ep: int | None = None

    def box(self, shape: tuple[int, ...], layout: Layout, place: ShardPlace) -> Box:
        offsets, sizes = [0] * len(shape), list(shape)
        shard, expert = divmod(place.dp_shard, 1 if self.ep is None else layout.ep)
        shards = layout.state_shards if self.ep is None else layout.expert_shards
        for axis, index, count in (
            (self.tp, place.tp, layout.tp),
            (self.ep, expert, layout.ep),
            (self.shard, shard, shards),
        ):
            if axis is not None:
                chunk = -(-sizes[axis] // count)
                first = min(index * chunk, sizes[axis])
                offsets[axis] += first
                sizes[axis] = min(chunk, sizes[axis] - first)
                if not sizes[axis]:  # where torch has an empty one
                    offsets[axis] = shape[axis]
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors of one rank may have in common. ``cut``: or the box itself."""

    dtype: str
    itemsize: int  # bytes per element
    shape: tuple[int, ...]
    cut: Cut | Box

    def box(self, layout: Layout, place: ShardPlace) -> Box:
        if isinstance(self.cut, Box):
            return self.cut
        return self.cut.box(self.shape, layout, place)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a rank has: tensors, each with the number of its kind. Of one it may have several boxes.

    Ranks with equal listings differ in their place alone.
    """

    kinds: tuple[TensorKind, ...]
    tensors: tuple[tuple[str, int], ...]

    def boxes_of(self, layout: Layout, place: ShardPlace) -> Iterator[tuple[str, TensorKind, Box]]:
        """What the rank at ``place`` has. Raises IndexError where a tensor is of no kind."""
        boxes = [kind.box(layout, place) for kind in self.kinds]
        for name, number in self.tensors:
            yield name, self.kinds[number], boxes[number]


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
    known: dict[tuple[tuple[int, ...], Box], Cut | Box] = {}
    tensors: list[tuple[str, int]] = []
    for name, dtype, itemsize, shape, box in parts:
        if (shape, box) not in known:
            known[shape, box] = find_cut(shape, box, layout, place)
        kind = TensorKind(dtype, itemsize, shape, known[shape, box])
        tensors.append((name, numbers.setdefault(kind, len(numbers))))
    return Listing(tuple(numbers), tuple(tensors))


def find_cut(shape: tuple[int, ...], box: Box, layout: Layout, place: ShardPlace) -> Cut | Box:
    """The simplest cut of which ``box`` is what ``place`` gets, or ``box`` if none is.

    Where several are, it does not matter which: whoever lists the same one has checked it too.
    """
    axes = (None, *range(len(shape)))
    by_tp = axes if layout.cuts_layers else (None,)
    by_shard = axes if layout.state_shards > 1 else (None,)
    by_ep = (None, 0) if layout.shares_experts and shape else (None,)
    for ep, tp, shard in product(by_ep, by_tp, by_shard):
        cut = Cut(tp, shard, ep)
        if cut.box(shape, layout, place) == box:
            return cut
    return box


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
                (listings[number].kinds[kind].box(layout, place), who)
                for number, layout, kind in alike
                for place, who in holders[number, layout].items()
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
