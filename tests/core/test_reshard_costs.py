"""Plans over tiers: the nearest good holder of each element sends it, against going one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import event, given
from hypothesis import strategies as st

from elastic_ft.core.sharding import Box, Piece, StateMissing
from tests.core.test_sharding import (
    anything,
    check_plan,
    elements,
    held_elements,
    missing_elements,
    placements,
)
from tests.core.whole_plans import plan_reshard

COSTS = (-1.0, 0.0, 1.0)  # on the target's node, elsewhere, in the store
Costs = dict[tuple[str, str], float]
HOLDERS = [f"w{i}" for i in range(4)]
costs = st.dictionaries(
    st.tuples(st.sampled_from([*HOLDERS, "w9"]), st.sampled_from(HOLDERS)), st.sampled_from(COSTS)
)
refusals = st.frozensets(st.sampled_from([*HOLDERS, "w9"]), max_size=2)


def cheapest(sources: Sequence[Piece], targets: Sequence[Piece], cost: Costs) -> float:
    """What moving costs at least, found element by element."""
    held, total = held_elements(sources), 0.0
    for (target, tensor), wanted in held_elements(targets).items():
        for element in wanted - held.get((target, tensor), set()):
            senders = [who for (who, t), found in held.items() if t == tensor and element in found]
            total += min(cost.get((who, target), 0.0) for who in senders)
    return total


def check_costs(sources: Sequence[Piece], targets: Sequence[Piece], cost: Costs) -> None:
    plan = plan_reshard(sources, targets, cost=cost)
    check_plan(plan, sources, targets)
    moved = [copy for copy in plan if not copy.is_local]
    paid = sum(cost.get((c.source, c.target), 0.0) * c.box.numel for c in moved)
    assert paid == cheapest(sources, targets, cost)


@given(anything(), costs, refusals)
def test_each_element_comes_from_the_cheapest_holder_that_is_not_refused(
    case: tuple[list[Piece], list[Piece]], cost: Costs, refused: frozenset[str]
) -> None:
    sources, targets = case
    sources = [piece for piece in sources if piece.holder not in refused]
    missing = bool(missing_elements(sources, targets))
    event(f"something is missing: {missing}")
    try:
        check_costs(sources, targets, cost)
    except StateMissing:
        assert missing


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=2)


@given(
    shapes.flatmap(lambda found: st.tuples(st.just(found), placements(found), placements(found))),
    refusals,
)
def test_a_checkpoint_gives_just_what_no_memory_has(
    case: tuple[list[list[int]], list[Piece], list[Piece]], refused: frozenset[str]
) -> None:
    """It has every tensor whole, and is the farthest."""
    found, memory, targets = case
    memory = [piece for piece in memory if piece.holder not in refused]
    stored = [Piece("store", f"t{i}", Box.whole(shape)) for i, shape in enumerate(found)]
    cost = {("store", piece.holder): 1.0 for piece in targets}
    plan = plan_reshard([*memory, *stored], targets, cost=cost)
    check_plan(plan, [*memory, *stored], targets)
    held = held_elements(memory)
    in_memory = {(tensor, element) for (_, tensor), some in held.items() for element in some}
    read = {(c.tensor, e) for c in plan if c.source == "store" for e in elements(c.box)}
    assert not read & in_memory
    assert read == missing_elements(memory, targets)
