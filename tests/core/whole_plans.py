"""What all holders plan for themselves, put together, to be checked element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from elastic_ft.core.box_owners import find_owners
from elastic_ft.core.sharding import Copy, Piece, Placement, place, plan_moves


def plan_reshard(
    sources: Iterable[Piece],
    targets: Iterable[Piece],
    itemsize: Mapping[str, int] | None = None,
    cost: Mapping[tuple[str, str], float] | None = None,
) -> tuple[Copy, ...]:
    """Everyone's copies, sorted; what one sends, another must receive."""
    return whole_plan(place(sources), place(targets), itemsize, cost)


def whole_plan(
    held: Placement,
    wanted: Placement,
    itemsize: Mapping[str, int] | None = None,
    cost: Mapping[tuple[str, str], float] | None = None,
) -> tuple[Copy, ...]:
    sides = [replicas for side in (held, wanted) for replicas in side.values()]
    holders = sorted({who for replicas in sides for some in replicas.values() for who in some})
    plans = {who: plan_moves(who, held, wanted, itemsize, cost) for who in holders}
    order = attrgetter("tensor", "target", "box")
    sent = sorted((copy for plan in plans.values() for copy in plan.sends), key=order)
    received = sorted((copy for plan in plans.values() for copy in plan.receives), key=order)
    assert sent == received
    for who, plan in plans.items():
        assert {copy.source for copy in (*plan.local, *plan.sends)} <= {who}
        assert {copy.target for copy in (*plan.local, *plan.receives)} <= {who}
    local = [copy for plan in plans.values() for copy in plan.local]
    return tuple(sorted([*local, *sent], key=order))


def partition_owners(
    pieces: Iterable[Piece], itemsize: Mapping[str, int] | None = None
) -> dict[str, list[Piece]]:
    """By holder, the pieces that it writes; on who writes what all agree."""
    pieces = tuple(pieces)
    placed = place(pieces)
    found: dict[str, list[Piece]] = {}
    said: dict[Piece, str] = {}
    for holder in sorted({piece.holder for piece in pieces}):
        owned = find_owners(holder, placed, itemsize)
        found[holder] = [Piece(holder, o.tensor, o.box) for o in owned if o.owner == holder]
        for one in owned:
            assert said.setdefault(Piece("", one.tensor, one.box), one.owner) == one.owner
    return found
