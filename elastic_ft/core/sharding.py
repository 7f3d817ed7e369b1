"""Training state as boxes of global tensors, and the plans that move or write them. Pure.

Every layout cuts a tensor into boxes: DDP holds the whole, FSDP2 slices dimension 0, TP dimension
0 or 1, pipeline stages hold some tensors and not others. Going from any layout to any other is
then one question: which box of which holder fills which part of which target.

A plan is a value, the same whoever computes it and in whatever order the pieces are given, so all
ranks may plan for themselves. ``runtime.transfer`` executes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple


class StateMissing(ValueError):
    """No source holds some part of a target. The message names the first tensor and box."""


# --------------------------------------------------------------------------------- boxes


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A block of a global tensor, ``offsets[d] <= x[d] < offsets[d] + sizes[d]``.

    No dimensions: a scalar, one element. A size of zero: empty, nothing to hold or to move.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"offsets {self.offsets} and sizes {self.sizes} differ in length")
        if self.sizes and (min(self.sizes) < 0 or min(self.offsets) < 0):
            raise ValueError(f"a box cannot be negative: {self.offsets}, {self.sizes}")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of an entire tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """What both boxes hold, or None if that is nothing. ValueError if dimensions differ."""
        if len(self.sizes) != len(other.sizes):
            raise ValueError(f"boxes {self} and {other} differ in dimensions")
        offsets, sizes = [], []
        for a, a_size, b, b_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            start = a if a > b else b
            size = min(a + a_size, b + b_size) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether ``other`` is inside this box. ValueError if dimensions differ."""
        pairs = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a <= b and b + b_size <= a + a_size for a, a_size, b, b_size in pairs)

    def minus(self, other: Box) -> tuple[Box, ...]:
        """Disjoint boxes that together are this one without ``other``; at most two a dimension."""
        cut = self.intersect(other)
        if cut is None:
            return (self,) if self.numel else ()
        rest: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for d, (start, size) in enumerate(zip(cut.offsets, cut.sizes, strict=True)):
            stop, own_stop = start + size, offsets[d] + sizes[d]
            for part, part_stop in ((offsets[d], start), (stop, own_stop)):
                if part < part_stop:
                    rest.append(_with(offsets, sizes, d, part, part_stop - part))
            offsets[d], sizes[d] = start, size
        return tuple(rest)

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """Indexes this box in an array that holds ``outer``. ValueError if it sticks out."""
        pairs = zip(self.offsets, self.sizes, outer.offsets, outer.sizes, strict=True)
        slices = tuple(slice(o - base, o - base + s) for o, s, base, _ in pairs)
        for cut, size in zip(slices, outer.sizes, strict=True):
            if cut.start < 0 or cut.stop > size:
                raise ValueError(f"box {self} is not inside box {outer}")
        return slices

    def __str__(self) -> str:
        ranges = zip(self.offsets, self.stops, strict=True)
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


def _with(offsets: list[int], sizes: list[int], d: int, offset: int, size: int) -> Box:
    return Box(
        (*offsets[:d], offset, *offsets[d + 1 :]),
        (*sizes[:d], size, *sizes[d + 1 :]),
    )


def overlapping(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of ``boxes`` that share an element, or None if all are disjoint."""
    ordered = sorted(box for box in boxes if box.numel)
    if ordered and not ordered[0].sizes:
        return (ordered[0], ordered[1]) if len(ordered) > 1 else None
    active: list[Box] = []  # those that reach into the slab of dimension 0 being swept
    for box in ordered:
        start = box.offsets[0]
        active = [a for a in active if a.offsets[0] + a.sizes[0] > start]
        for other in active:
            if box.intersect(other):
                return other, box
        active.append(box)
    return None


def uncovered(whole: Box, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes that together are what of ``whole`` none of ``boxes`` holds."""
    rest = [whole] if whole.numel else []
    for box in boxes:
        rest = [part for old in rest for part in old.minus(box)]
    return tuple(sorted(rest))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, as disjoint boxes.

    In order, each of them contiguous; at most two a dimension, less one.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = tuple(shape[1:])
    size = prod(inner)
    row, first = divmod(start, size)
    if first or stop < (row + 1) * size:  # a part of a row
        for box in boxes_of_range(inner, first, min(stop - row * size, size)):
            yield Box((row, *box.offsets), (1, *box.sizes))
        row += 1
    rows = max(0, stop // size - row)
    if rows:
        yield Box((row, *(0,) * len(inner)), (rows, *inner))
    if (row + rows) * size < stop:
        for box in boxes_of_range(inner, 0, stop - (row + rows) * size):
            yield Box((row + rows, *box.offsets), (1, *box.sizes))


def slabs(box: Box, numel_max: int) -> Iterator[Box]:
    """``box`` in parts of at most ``numel_max`` elements, each contiguous in row-major order."""
    if box.numel <= max(numel_max, 1):
        yield box
        return
    axis = next(d for d, size in enumerate(box.sizes) if size > 1)
    rows, size = max(1, numel_max * box.sizes[axis] // box.numel), box.sizes[axis]
    offsets, sizes = list(box.offsets), list(box.sizes)
    for start in range(0, size, rows):
        part = _with(offsets, sizes, axis, box.offsets[axis] + start, min(rows, size - start))
        yield from slabs(part, numel_max)


# ------------------------------------------------------------------------------ resharding


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one tensor, at one holder: a worker, a node keeper, a URL."""

    holder: str
    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Copy:
    """``box`` of ``tensor``, in global coordinates, goes from ``source`` to ``target``."""

    tensor: str
    source: str
    target: str
    box: Box

    @property
    def is_local(self) -> bool:
        """True where nothing crosses from one holder to another."""
        return self.source == self.target


Holders = tuple[str, ...]  # sorted
Replicas = dict[Box, Holders]  # of one tensor: who has exactly this box


class Cell(NamedTuple):
    """A part of a target that any one of ``candidates`` can send whole."""

    tensor: str
    target: str
    box: Box
    candidates: Holders


def plan_reshard(
    sources: Iterable[Piece],
    targets: Iterable[Piece],
    itemsize: Mapping[str, int] | None = None,
    cost: Mapping[tuple[str, str], float] | None = None,
) -> tuple[Copy, ...]:
    """Returns copies that write each element of each target exactly once, sorted by tensor.

    What a target's holder has itself is not moved, so no plan moves fewer bytes. The rest comes
    from the cheapest of those that have it, and among equally cheap ones from the holder that
    sends the fewest bytes so far. Sources may be partial, replicated, and overlap.

    itemsize: bytes per element of each tensor; 1 where it is not given.
    cost: of moving from one holder to another (source, target), compared first; 0 where it is
        not given. Any scale: say 0 within a node, 1 across.

    Raises StateMissing if some element of a target has no source, and ValueError if boxes of a
    tensor differ in dimensions or one holder's targets overlap.
    """
    held = _replicas_by_tensor(sources)
    wanted = _replicas_by_tensor(targets)
    local: list[Copy] = []
    remote: list[Cell] = []
    cells_of: dict[Any, list[Cell]] = {}  # many tensors are cut alike
    for tensor in sorted(wanted):
        alike = (_pattern(held.get(tensor, {})), _pattern(wanted[tensor]))
        if alike not in cells_of:
            _refuse_overlapping_targets(tensor, wanted[tensor])
            cells_of[alike] = list(_cells_of_tensor(tensor, held.get(tensor, {}), wanted[tensor]))
        for _, target, box, candidates in cells_of[alike]:
            if target in candidates:
                local.append(Copy(tensor, target, target, box))
            else:
                remote.append(Cell(tensor, target, box, candidates))
    copies = local + _choose_senders(remote, itemsize or {}, cost or {})
    return tuple(sorted(copies, key=attrgetter("tensor", "target", "box")))


def bytes_moved(copies: Iterable[Copy], itemsize: Mapping[str, int] | None = None) -> int:
    """Bytes that cross from one holder to another; itemsize as in ``plan_reshard``."""
    sizes = itemsize or {}
    return sum(c.box.numel * sizes.get(c.tensor, 1) for c in copies if not c.is_local)


def _replicas_by_tensor(pieces: Iterable[Piece]) -> dict[str, Replicas]:
    """tensor -> box -> the holders of exactly that box, sorted. Empty boxes are left out."""
    found: dict[str, dict[Box, set[str]]] = defaultdict(lambda: defaultdict(set))
    for piece in pieces:
        if 0 not in piece.box.sizes:
            found[piece.tensor][piece.box].add(piece.holder)
    return {
        tensor: {box: tuple(sorted(holders)) for box, holders in boxes.items()}
        for tensor, boxes in found.items()
    }


def _pattern(replicas: Replicas) -> frozenset[tuple[Box, Holders]]:
    return frozenset(replicas.items())


def _cells_of_tensor(tensor: str, held: Replicas, wanted: Replicas) -> Iterator[Cell]:
    """The targets of one tensor, cut where the set of those who can send changes."""
    disjoint = overlapping(held) is None  # no layout here cuts otherwise; then it is quick
    for box, targets in sorted(wanted.items()):
        near = _touching(box, held, disjoint)
        if gap := _gap(box, near, disjoint):
            raise StateMissing(f"{tensor}: no holder has {gap}, {targets[0]} wants {box}")
        for target in targets:
            parts = near if disjoint else _cut_up(box, target, near)
            for part, candidates in parts:
                yield Cell(tensor, target, part, candidates)


def _touching(box: Box, held: Replicas, disjoint: bool) -> list[tuple[Box, Holders]]:
    """The sources that share an element with ``box``, cut down to it, sorted."""
    if disjoint and box in held:
        return [(box, held[box])]
    cuts = ((box.intersect(source), holders) for source, holders in held.items())
    return sorted((cut, holders) for cut, holders in cuts if cut is not None)


def _gap(box: Box, near: list[tuple[Box, Holders]], disjoint: bool) -> Box | None:
    """The first part of ``box`` that no source has."""
    if disjoint and sum(cut.numel for cut, _ in near) == box.numel:
        return None
    return next(iter(uncovered(box, (cut for cut, _ in near))), None)


def _cut_up(box: Box, target: str, near: list[tuple[Box, Holders]]) -> list[tuple[Box, Holders]]:
    """Disjoint parts of ``box``, each with all holders that have it, or just ``target``.

    The target's own boxes come first, whole: what it holds must not be cut up by its peers'.
    """
    own: list[tuple[Box, Holders]] = []
    rest = [box]
    for cut in (cut for cut, holders in near if target in holders):
        own += [(part, (target,)) for old in rest if (part := old.intersect(cut))]
        rest = [part for old in rest for part in old.minus(cut)]
    remote: list[tuple[Box, Holders]] = [(part, ()) for part in rest]
    for cut, holders in ((cut, holders) for cut, holders in near if target not in holders):
        remote = [new for old in remote for new in _split(old, cut, holders)]
    return own + remote


def _split(part: tuple[Box, Holders], cut: Box, holders: Holders) -> list[tuple[Box, Holders]]:
    """``part`` where ``holders`` have it too, and the rest of it."""
    box, candidates = part
    inside = box.intersect(cut)
    if inside is None:
        return [part]
    everyone = tuple(sorted({*candidates, *holders}))
    return [(inside, everyone), *((outside, candidates) for outside in box.minus(cut))]


def _refuse_overlapping_targets(tensor: str, wanted: Replicas) -> None:
    """One holder's targets must be disjoint: an element written twice has no one value."""
    boxes_of: dict[str, list[Box]] = defaultdict(list)
    for box, holders in wanted.items():
        for holder in holders:
            boxes_of[holder].append(box)
    for holder, boxes in boxes_of.items():
        if len(boxes) > 1 and (pair := overlapping(boxes)):
            raise ValueError(f"{tensor}: targets {pair[0]} and {pair[1]} of {holder} overlap")


def _choose_senders(
    cells: Iterable[Cell],
    itemsize: Mapping[str, int],
    cost: Mapping[tuple[str, str], float],
) -> list[Copy]:
    """Who sends what: cheapest, then least loaded. What has no choice first, then largest first."""
    weighed = [(cell.box.numel * itemsize.get(cell.tensor, 1), cell) for cell in cells]
    weighed.sort(key=lambda pair: (len(pair[1].candidates) > 1, -pair[0], pair[1]))
    sent: dict[str, int] = defaultdict(int)
    copies: list[Copy] = []
    for nbytes, (tensor, target, box, candidates) in weighed:
        keys = ((cost.get((c, target), 0.0), sent[c], c) for c in candidates)
        sender = min(keys)[2]
        sent[sender] += nbytes
        copies.append(Copy(tensor, sender, target, box))
    return copies


# ------------------------------------------------------------------------- checkpoint owners


def partition_owners(
    pieces: Iterable[Piece], itemsize: Mapping[str, int] | None = None
) -> dict[str, list[Piece]]:
    """Returns, for every holder, the pieces it writes: each box once, bytes spread evenly.

    Identical boxes are replicas; other boxes of one tensor are disjoint, which is asserted: every
    layout here cuts that way. Pieces that one holder alone has are counted first, then the
    replicated ones go, largest first, to whoever writes least. Empty boxes are written by no one.
    """
    pieces = tuple(pieces)
    sizes = itemsize or {}
    held: list[tuple[int, str, Box, Holders]] = []
    for tensor, replicas in _replicas_by_tensor(pieces).items():
        pair = overlapping(replicas)
        assert pair is None, f"{tensor}: {pair[0]} and {pair[1]} overlap, and are not replicas"
        for box, holders in replicas.items():
            held.append((box.numel * sizes.get(tensor, 1), tensor, box, holders))
    held.sort(key=lambda h: (len(h[3]) > 1, -h[0], h[1], h[2]))
    load = dict.fromkeys(sorted({piece.holder for piece in pieces}), 0)
    owned: dict[str, list[Piece]] = {holder: [] for holder in load}
    for nbytes, tensor, box, holders in held:
        owner = min(holders, key=lambda h: (load[h], h))
        load[owner] += nbytes
        owned[owner].append(Piece(owner, tensor, box))
    for mine in owned.values():
        mine.sort(key=attrgetter("tensor", "box"))
    return owned
