"""Boxes, and plans against a planner that goes element by element."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from elastic_ft.core.sharding import (
    Box,
    Copy,
    Piece,
    StateMissing,
    boxes_of_range,
    overlapping,
    uncovered,
)
from tests.core.whole_plans import partition_owners, plan_reshard

Element = tuple[int, ...]

# ------------------------------------------------------------------------------- oracles


def elements(box: Box) -> Iterator[Element]:
    return product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))


def held_elements(pieces: Sequence[Piece]) -> dict[tuple[str, str], set[Element]]:
    """(holder, tensor) -> the elements it has: the deliberately dumb catalogue."""
    held: dict[tuple[str, str], set[Element]] = {}
    for piece in pieces:
        held.setdefault((piece.holder, piece.tensor), set()).update(elements(piece.box))
    return held


def missing_elements(
    sources: Sequence[Piece], targets: Sequence[Piece]
) -> set[tuple[str, Element]]:
    have = {(t, e) for (_, t), found in held_elements(sources).items() for e in found}
    want = {(t, e) for (_, t), found in held_elements(targets).items() for e in found}
    return want - have


def bytes_of_copies(plan: Sequence[Copy], itemsize: int = 1) -> int:
    return sum(copy.box.numel * itemsize for copy in plan if not copy.is_local)


def check_plan(plan: Sequence[Copy], sources: Sequence[Piece], targets: Sequence[Piece]) -> None:
    """Each element of each target exactly once, from one who has it, moved only if it must be."""
    held, wanted = held_elements(sources), held_elements(targets)
    written = Counter((c.target, c.tensor, e) for c in plan for e in elements(c.box))
    assert set(written.values()) <= {1}
    assert written.keys() == {(h, t, e) for (h, t), found in wanted.items() for e in found}
    for copy in plan:
        assert held[copy.source, copy.tensor].issuperset(elements(copy.box))
    lacking = sum(len(found - held.get(key, set())) for key, found in wanted.items())
    assert bytes_of_copies(plan) == lacking


# ------------------------------------------------------------------------------ strategies


def boxes_within(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Any box of a tensor of ``shape``, empty ones included."""
    ranges = st.tuples(
        *(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape)
    )
    return ranges.map(lambda pairs: Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs)))


@st.composite
def cuttings(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """A tensor cut, unevenly, by a grid: disjoint boxes that are the whole, some of them empty."""
    cuts = [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n] for n in shape]
    grid = product(*(list(pairwise(c)) for c in cuts))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in grid]


@st.composite
def placements(draw: st.DrawFn, shapes: Sequence[Sequence[int]]) -> list[Piece]:
    """What a real layout holds: each tensor cut its own way, each box on one or more holders."""
    holders = [f"w{i}" for i in range(draw(st.integers(1, 4)))]
    pieces = []
    for index, shape in enumerate(shapes):
        for box in draw(cuttings(shape)):
            having = draw(st.lists(st.sampled_from(holders), min_size=1, unique=True))
            pieces += [Piece(holder, f"t{index}", box) for holder in having]
    return pieces


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=3)
relayouts = shapes.flatmap(lambda found: st.tuples(placements(found), placements(found)))


@st.composite
def anything(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Sources that overlap, are partial or lack something; targets disjoint per holder."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    holders = st.sampled_from(["w0", "w1", "w2", "w3"])
    box = boxes_within(shape)
    sources = draw(st.lists(st.builds(Piece, holders, st.just("t"), box), max_size=8))
    if draw(st.booleans()):
        sources.append(Piece("w9", "t", Box.whole(shape)))
    targets: list[Piece] = []
    for piece in draw(st.lists(st.builds(Piece, holders, st.just("t"), box), max_size=6)):
        mine = [old.box for old in targets if old.holder == piece.holder]
        if piece.box in mine or not any(piece.box.intersect(old) for old in mine):
            targets.append(piece)
    return sources, targets


# --------------------------------------------------------------------------------- boxes

pairs_of_boxes = st.lists(st.integers(0, 5), max_size=3).flatmap(
    lambda shape: st.tuples(boxes_within(shape), boxes_within(shape))
)


@given(pairs_of_boxes)
def test_box_algebra_is_set_algebra(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = set(elements(a)) & set(elements(b))
    cut = a.intersect(b)
    assert set(elements(cut) if cut else ()) == both
    assert cut == b.intersect(a)
    assert a.numel == len(set(elements(a)))
    rest = [e for part in a.minus(b) for e in elements(part)]
    assert len(rest) == len(set(rest))
    assert set(rest) == set(elements(a)) - both


@given(pairs_of_boxes)
def test_slices_find_the_elements_in_the_outer_array(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    if cut := outer.intersect(other):
        axes = zip(cut.slices_within(outer), outer.offsets, outer.sizes, strict=True)
        found = product(*([i + base for i in range(size)[cut]] for cut, base, size in axes))
        assert list(found) == list(elements(cut))


@given(st.lists(st.integers(0, 5), max_size=3).flatmap(lambda s: st.lists(boxes_within(s))))
def test_overlapping_finds_a_pair_iff_there_is_one(boxes: list[Box]) -> None:
    truth = any(a.intersect(b) for a, b in combinations(boxes, 2))
    pair = overlapping(boxes)
    assert (pair is not None) == truth
    if pair:
        assert pair[0].intersect(pair[1])


@given(
    st.lists(st.integers(0, 4), max_size=3).flatmap(
        lambda s: st.tuples(boxes_within(s), st.lists(boxes_within(s), max_size=5))
    )
)
def test_uncovered_is_the_difference(case: tuple[Box, list[Box]]) -> None:
    whole, boxes = case
    rest = uncovered(whole, boxes)
    assert overlapping(rest) is None
    covered = {e for box in boxes for e in elements(box)}
    assert {e for box in rest for e in elements(box)} == set(elements(whole)) - covered


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 6), (2, 3, 2), (2, 1, 3, 2)])
def test_a_range_is_cut_into_boxes_in_its_order(shape: tuple[int, ...]) -> None:
    flattened = list(elements(Box.whole(shape)))
    for start, stop in combinations(range(len(flattened) + 1), 2):
        boxes = list(boxes_of_range(shape, start, stop))
        assert [e for box in boxes for e in elements(box)] == flattened[start:stop]
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert not list(boxes_of_range(shape, 1, 1))


def test_scalars_and_empty_boxes() -> None:
    scalar, empty = Box.whole(()), Box((3, 0), (0, 4))
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices_within(scalar) == ()
    assert scalar.minus(scalar) == ()
    assert empty.numel == 0
    assert empty.intersect(Box.whole((5, 5))) is None
    assert empty.minus(empty) == ()


def test_bad_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="cannot be negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="differ in dimensions"):
        Box.whole((4,)).intersect(Box.whole((4, 1)))
    with pytest.raises(ValueError, match=r"\[2:5\] is not inside box \[0:4\]"):
        Box((2,), (3,)).slices_within(Box.whole((4,)))


def test_a_box_prints_as_ranges() -> None:
    assert str(Box((0, 2), (4, 3))) == "[0:4, 2:5]"


# ------------------------------------------------------------------------------ resharding


@given(relayouts)
def test_any_layout_goes_to_any_other(case: tuple[list[Piece], list[Piece]]) -> None:
    sources, targets = case
    check_plan(plan_reshard(sources, targets), sources, targets)


@given(anything())
def test_overlapping_and_partial_sources(case: tuple[list[Piece], list[Piece]]) -> None:
    sources, targets = case
    missing = missing_elements(sources, targets)
    event(f"something is missing: {bool(missing)}")
    if missing:
        with pytest.raises(StateMissing, match=r"t: no holder has \["):
            plan_reshard(sources, targets)
    else:
        check_plan(plan_reshard(sources, targets), sources, targets)


@given(relayouts, st.randoms(use_true_random=False))
def test_the_order_of_the_pieces_does_not_matter(case, random) -> None:  # type: ignore[no-untyped-def]
    sources, targets = case
    plan = plan_reshard(sources, targets)
    random.shuffle(sources)
    random.shuffle(targets)
    assert plan_reshard(sources, targets) == plan


HASH_SEED_PROGRAM = """
from elastic_ft.core.sharding import Box, Piece
from tests.core.whole_plans import partition_owners, plan_reshard
box = [Box((8 * i, 0), (8, 5)) for i in range(3)]
sources = [Piece(f"w{r}", f"t{t}", b) for t in range(9) for r in range(5) for b in box[: r + 1]]
targets = [Piece(f"x{r}", f"t{t}", Box((4 * r, 0), (4, 5))) for t in range(9) for r in range(6)]
print(plan_reshard(sources, targets), partition_owners([p for p in sources if p.holder != "w4"]))
"""


def test_the_hash_seed_does_not_matter() -> None:
    root = Path(__file__).parents[2]
    printed = {
        subprocess.run(
            [sys.executable, "-c", HASH_SEED_PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
            timeout=240,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@given(
    tensors=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    replicas=st.integers(1, 5),
    joiners=st.integers(1, 3),
)
def test_replicas_share_the_sending(tensors: list[int], replicas: int, joiners: int) -> None:
    """To no joiner one sends more than one largest tensor above another."""
    itemsize = {f"t{i}": 4 for i in range(len(tensors))}
    wholes = {f"t{i}": Box.whole((n,)) for i, n in enumerate(tensors)}
    sources = [Piece(f"w{r}", t, box) for t, box in wholes.items() for r in range(replicas)]
    targets = [Piece(f"x{j}", t, box) for t, box in wholes.items() for j in range(joiners)]
    sent = {f"x{j}": Counter({f"w{r}": 0 for r in range(replicas)}) for j in range(joiners)}
    for copy in plan_reshard(sources, targets, itemsize):
        sent[copy.target][copy.source] += copy.box.numel * 4
    for each in sent.values():
        assert sum(each.values()) == 4 * sum(tensors)
        assert max(each.values()) - min(each.values()) <= 4 * max(tensors)


def test_the_next_joiner_is_served_by_the_next_sender() -> None:
    sources = [Piece(f"w{r}", "t", Box.whole((8,))) for r in range(3)]
    targets = [Piece(f"x{j}", "t", Box.whole((8,))) for j in range(3)]
    plan = plan_reshard(sources, targets)
    assert {copy.source for copy in plan} == {"w0", "w1", "w2"}


def test_a_pure_shrink_moves_only_the_lost_shard() -> None:
    """Of 8 rows in 4 shards with a buddy each, w3 dies: what the rest held stays where it is."""
    row = [Box((2 * i,), (2,)) for i in range(4)]
    sources = [Piece(f"w{i}", "t", row[i]) for i in range(3)] + [Piece("w0", "t", row[3])]
    targets = [Piece("w0", "t", row[0]), Piece("w1", "t", row[1])]
    targets += [Piece("w2", "t", Box((4,), (4,)))]
    plan = plan_reshard(sources, targets, {"t": 4})
    assert [c for c in plan if not c.is_local] == [Copy("t", "w0", "w2", row[3])]
    assert bytes_of_copies(plan, 4) == 8


def test_own_state_is_taken_whole_before_that_of_peers() -> None:
    whole, half = Box.whole((8,)), Box((2,), (4,))
    sources = [Piece("w0", "t", half), Piece("w1", "t", whole), Piece("w2", "t", Box((0,), (3,)))]
    plan = plan_reshard(sources, [Piece("w0", "t", whole)])
    assert Copy("t", "w0", "w0", half) in plan
    check_plan(plan, sources, [Piece("w0", "t", whole)])


def test_the_cheapest_source_wins_over_the_balance() -> None:
    whole = Box.whole((4,))
    sources = [Piece(h, t, whole) for h in ("near", "far") for t in ("a", "b", "c")]
    targets = [Piece("new", t, whole) for t in ("a", "b", "c")]
    plan = plan_reshard(sources, targets, cost={("far", "new"): 1.0})
    assert {copy.source for copy in plan} == {"near"}
    assert {copy.source for copy in plan_reshard(sources, targets)} == {"near", "far"}


def test_missing_state_names_the_first_tensor_and_box() -> None:
    sources = [Piece("w0", "b", Box((0, 0), (2, 4)))]
    targets = [Piece("w1", t, Box((1, 0), (3, 4))) for t in ("c", "b")]
    with pytest.raises(
        StateMissing, match=r"^b: no holder has \[2:4, 0:4\], w1 wants \[1:4, 0:4\]"
    ):
        plan_reshard(sources, targets)


def test_overlapping_targets_of_one_holder_are_refused() -> None:
    targets = [Piece("w0", "t", Box((0,), (3,))), Piece("w0", "t", Box((2,), (3,)))]
    with pytest.raises(ValueError, match=r"targets \[0:3\] and \[2:5\] of w0 overlap"):
        plan_reshard([Piece("w0", "t", Box.whole((5,)))], targets)


# ------------------------------------------------------------------------- checkpoint owners


@given(shapes.flatmap(placements))
def test_every_element_has_one_owner_that_holds_it(pieces: list[Piece]) -> None:
    owned = partition_owners(pieces)
    assert owned.keys() == {piece.holder for piece in pieces}
    for holder, mine in owned.items():
        assert {piece.holder for piece in mine} <= {holder}
        assert set(mine) <= set(pieces)
    written = Counter(
        (p.tensor, e) for mine in owned.values() for p in mine for e in elements(p.box)
    )
    assert set(written.values()) <= {1}
    assert written.keys() == {(p.tensor, e) for p in pieces for e in elements(p.box)}


@given(tensors=st.lists(st.integers(1, 60), min_size=1, max_size=30), replicas=st.integers(1, 5))
def test_replicas_share_the_writing(tensors: list[int], replicas: int) -> None:
    boxes = {f"t{i}": Box.whole((n,)) for i, n in enumerate(tensors)}
    owned = partition_owners(
        [Piece(f"w{r}", t, box) for t, box in boxes.items() for r in range(replicas)]
    )
    loads = [sum(piece.box.numel for piece in mine) for mine in owned.values()]
    assert max(loads) - min(loads) <= max(tensors)


def test_replicated_tensors_go_to_those_with_little_of_their_own() -> None:
    pieces = [Piece("w0", "big", Box((0,), (90,))), Piece("w1", "big", Box((90,), (10,)))]
    pieces += [Piece(w, "norm", Box.whole((40,))) for w in ("w0", "w1")]
    owned = partition_owners(pieces)
    assert [piece.tensor for piece in owned["w1"]] == ["big", "norm"]


def test_boxes_that_overlap_without_being_equal_are_a_bug() -> None:
    pieces = [Piece("w0", "t", Box((0,), (3,))), Piece("w1", "t", Box((2,), (3,)))]
    with pytest.raises(AssertionError, match="overlap"):
        partition_owners(pieces)
