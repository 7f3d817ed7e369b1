"""Training state as boxes of global tensors, and the plans that move or write them. Pure.

Every layout cuts a tensor into boxes: DDP holds the whole, FSDP2 slices dimension 0, TP dimension
0 or 1, pipeline stages hold some tensors and not others. Going from any layout to any other is
then one question: which box of which holder fills which part of which target.

A plan is a value, and agrees with everybody else's: each rank plans for itself what it sends and
receives. ``state.transfer`` executes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod
from operator import attrgetter
from typing import NamedTuple


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
    return Box((*offsets[:d], offset, *offsets[d + 1 :]), (*sizes[:d], size, *sizes[d + 1 :]))


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
Replicas = Mapping[Box, Holders]  # of one tensor: who has exactly this box; none is empty
Placement = Mapping[str, Replicas]  # by tensor; of those that are cut alike, one object
Sized = tuple[int, str, Box]  # bytes, tensor, box


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What one holder does. Its peers' plans agree: what it sends to one, that one receives."""

    local: tuple[Copy, ...]
    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]


class Cell(NamedTuple):
    """A part of a tensor that any one of ``candidates`` can send whole to each of ``targets``."""

    box: Box
    candidates: Holders
    targets: Holders  # those who have it not
    turn: int  # which of all that want it the first of them is
    is_mine: bool  # whose plan it is has it, and wants it


def place(pieces: Iterable[Piece], among: Placement | None = None) -> dict[str, Replicas]:
    """Who has which box, of ``among`` and of ``pieces``. Empty boxes are left out."""
    added: dict[str, dict[Box, set[str]]] = defaultdict(lambda: defaultdict(set))
    for piece in pieces:
        if 0 not in piece.box.sizes:
            added[piece.tensor][piece.box].add(piece.holder)
    found, known = dict(among or {}), {}
    for tensor, boxes in added.items():
        before = found.get(tensor, {})
        alike = (id(before), tuple(sorted((box, *sorted(who)) for box, who in boxes.items())))
        if alike not in known:
            merged = dict(before)
            for box, who in boxes.items():
                merged[box] = tuple(sorted(who.union(before.get(box, ()))))
            known[alike] = merged
        found[tensor] = known[alike]
    return found


def plan_moves(
    me: str,
    held: Placement,
    wanted: Placement,
    itemsize: Mapping[str, int] | None = None,
    cost: Mapping[tuple[str, str], float] | None = None,
) -> ReshardPlan:
    """Returns what ``me`` sends, receives and has: all plans together write each element of each
    target exactly once.

    What a target's holder has itself is not moved, so no plan moves fewer bytes. The rest comes
    from the cheapest of those that have it, who share the sending of what they can all send.
    Sources may be partial, replicated, and overlap. Work grows with the holders, and with what
    this one has; not with what all have.

    itemsize: bytes per element of each tensor; 1 where it is not given.
    cost: of moving from one holder to another (source, target), compared first; 0 where it is
        not given. Any scale: say 0 within a node, 1 across.

    Raises StateMissing if some element that ``me`` wants has no source, and ValueError if boxes of
    a tensor differ in dimensions or its own targets overlap.
    """
    local: list[Copy] = []
    flows: dict[tuple[Holders, Holders, int], list[Sized]] = defaultdict(list)
    for tensors in cut_alike(held, wanted):
        first = tensors[0]
        for cell in _cells_near(me, first, held.get(first, {}), wanted[first]):
            if cell.is_mine:
                local += [Copy(tensor, me, me, cell.box) for tensor in tensors]
            if cell.targets:
                flow = flows[cell.candidates, cell.targets, cell.turn]
                flow += sized(tensors, cell.box, itemsize or {})
    moved = [
        copy
        for (candidates, targets, turn), cells in flows.items()
        for copy in _share_out(me, cells, candidates, targets, turn, cost or {})
    ]
    moved.sort(key=_ORDER)
    return ReshardPlan(
        tuple(sorted(local, key=_ORDER)),
        tuple(copy for copy in moved if copy.source == me),
        tuple(copy for copy in moved if copy.target == me),
    )


_ORDER = attrgetter("tensor", "source", "target", "box")


def sized(tensors: Iterable[str], box: Box, itemsize: Mapping[str, int]) -> list[Sized]:
    numel = box.numel
    return [(numel * itemsize.get(tensor, 1), tensor, box) for tensor in tensors]


def cut_alike(*sides: Placement) -> list[list[str]]:
    """The tensors of the last, sorted; those together that are cut alike in all ``sides``."""
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for tensor in sorted(sides[-1]):
        found[tuple([id(side.get(tensor)) for side in sides])].append(tensor)
    return list(found.values())


def _cells_near(me: str, tensor: str, held: Replicas, wanted: Replicas) -> Iterator[Cell]:
    """The targets of one tensor, cut where the set of those who can send changes: what ``me``
    wants, and what it has."""
    disjoint = overlapping(held) is None  # no layout here cuts otherwise; then it is quick
    own = [box for box, holders in held.items() if me in holders]
    _refuse_overlapping(me, tensor, [box for box, holders in wanted.items() if me in holders])
    for box, targets in sorted(wanted.items()):
        is_wanted = me in targets
        if not is_wanted and not any(box.intersect(some) for some in own):
            continue
        sources = held if is_wanted or not disjoint else {some: held[some] for some in own}
        near = _touching(box, sources, disjoint)
        if is_wanted and (gap := _gap(box, near, disjoint)):
            raise StateMissing(f"{tensor}: no holder has {gap}, {me} wants {box}")
        if disjoint:
            for part, candidates in near:
                have = frozenset(candidates)
                lack = tuple(target for target in targets if target not in have)
                yield Cell(part, candidates, lack, 0, is_wanted and me in have)
            continue
        for turn, target in enumerate(targets):
            for part, candidates in _cut_up(box, target, near):
                if target in candidates:
                    if target == me:
                        yield Cell(part, candidates, (), 0, True)
                elif target == me or me in candidates:
                    yield Cell(part, candidates, (target,), turn, False)


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


def _refuse_overlapping(me: str, tensor: str, targets: list[Box]) -> None:
    """An element written twice has no one value."""
    if len(targets) > 1 and (pair := overlapping(targets)):
        raise ValueError(f"{tensor}: targets {pair[0]} and {pair[1]} of {me} overlap")


def _share_out(
    me: str,
    cells: list[Sized],
    candidates: Holders,
    targets: Holders,
    turn: int,
    cost: Mapping[tuple[str, str], float],
) -> Iterator[Copy]:
    """Of ``cells``, which each of ``targets`` gets from one of ``candidates``, those from or to
    ``me``. The next target begins with the sender after the last one's."""
    cells.sort(key=largest_first)
    dealt: dict[int, list[list[Sized]]] = {}
    for number, target in enumerate(targets, turn):
        if me not in candidates and target != me:
            continue
        senders = _cheapest(candidates, target, cost)
        count = len(senders)
        hands = dealt.get(count)
        if hands is None:
            hands = dealt[count] = deal_cells(cells, [0] * count)
        first = number * (len(cells) % count or 1)
        for sender in (me,) if target != me else senders:
            if sender in senders:
                hand = hands[(senders.index(sender) - first) % count]
                yield from (Copy(tensor, sender, target, box) for _, tensor, box in hand)


def largest_first(cell: Sized) -> tuple[int, str, Box]:
    return -cell[0], cell[1], cell[2]


def _cheapest(
    candidates: Holders, target: str, cost: Mapping[tuple[str, str], float]
) -> Sequence[str]:
    if len(candidates) == 1 or not cost:
        return candidates
    costs = [cost.get((candidate, target), 0.0) for candidate in candidates]
    least = min(costs)
    return [c for c, each in zip(candidates, costs, strict=True) if each == least]


def deal_cells(cells: Iterable[Sized], loads: Sequence[int]) -> list[list[Sized]]:
    """``cells``, the largest first, each to who has least: as many hands as ``loads``."""
    hands: list[list[Sized]] = [[] for _ in loads]
    heap = [(load, hand) for hand, load in enumerate(loads)]
    heapify(heap)
    for cell in cells:
        load, hand = heap[0]
        hands[hand].append(cell)
        heapreplace(heap, (load + cell[0], hand))
    return hands
