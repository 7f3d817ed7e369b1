"""Listings: what everyone computes of everybody's boxes, against the boxes themselves."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.placement import (
    Cut,
    HolderPart,
    Listing,
    find_cut,
    list_parts,
    place_parts,
)
from elastic_ft.core.sharding import Box, Piece, Placement, place
from tests.core.test_sharding import check_plan
from tests.core.whole_plans import whole_plan

SHAPES = {"matrix": (7, 6), "vector": (5,), "scalar": (), "wide": (2, 9), "cube": (3, 4, 2)}
ITEMSIZES = {"matrix": 4, "vector": 2, "scalar": 8, "wide": 4, "cube": 1}
sizes = st.integers(1, 3)
plain = st.builds(Layout, dp_replicate=sizes, dp_shard=st.integers(1, 5), pp=sizes, tp=sizes)


@st.composite
def shared_out(draw: st.DrawFn) -> Layout:
    """The rows of the matrix are experts, whoever has which."""
    ep = draw(sizes)
    owner, most = st.integers(0, ep - 1), SHAPES["matrix"][0]
    owners = draw(st.one_of(st.just([]), st.lists(owner, min_size=most, max_size=most)))
    return Layout(dp_shard=draw(sizes) * ep, ep=ep, owners=tuple(owners) if ep > 1 else ())


layouts = st.one_of(plain, shared_out())


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Cut | None]:
    """Of each tensor. None: each rank has what no cut explains."""

    def axis(shape: tuple[int, ...]) -> int | None:
        return draw(st.sampled_from([None, *range(len(shape))]))

    return {
        name: None
        if shape and draw(st.integers(0, 5)) == 0
        else Cut(axis(shape), axis(shape), draw(st.sampled_from([None, 0])) if shape else None)
        for name, shape in SHAPES.items()
    }


def odd_part(shape: tuple[int, ...], layout: Layout, place: ShardPlace) -> Box:
    """Rows of the first axis, more of them the later the shard."""
    count = layout.dp_shard
    stops = [shape[0] * (i * i) // (count * count) for i in range(count + 1)]
    start, stop = stops[place.dp_shard], stops[place.dp_shard + 1]
    return Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


def parts(
    cut: dict[str, Cut | None], layout: Layout, place: ShardPlace
) -> list[tuple[str, str, int, tuple[int, ...], Box]]:
    """Of the tensors of one stage; the scalar is in all of them."""
    found = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        if number % layout.pp == place.pp or not shape:
            how = cut[name]
            boxes = how.boxes(shape, layout, place) if how else (odd_part(shape, layout, place),)
            found += [(name, "float32", ITEMSIZES[name], shape, box) for box in boxes]
    return found


def shares(
    cut: dict[str, Cut | None], layout: Layout, prefix: str = ""
) -> tuple[list[HolderPart], list[Piece]]:
    """What each rank says, equal listings being one object, and what it has."""
    listings: dict[Listing, Listing] = {}
    said, pieces = [], []
    for rank in range(layout.world_size):
        at = layout.place_of(rank)
        own = parts(cut, layout, at)
        listing = list_parts(own, layout, at)
        said.append(
            HolderPart(f"{prefix}{rank}", listings.setdefault(listing, listing), layout, at)
        )
        pieces += [Piece(f"{prefix}{rank}", name, box) for name, _, _, _, box in own]
    return said, pieces


def as_sets(placement: Placement) -> dict[str, dict[Box, set[str]]]:
    return {name: {box: {*who} for box, who in some.items()} for name, some in placement.items()}


@given(cuts(), layouts)
def test_everyone_knows_what_everyone_has(cut: dict[str, Cut | None], layout: Layout) -> None:
    said, pieces = shares(cut, layout)
    event(f"listings: {len({id(share.listing) for share in said})}")
    for share, rank in zip(said, range(layout.world_size), strict=True):
        own = parts(cut, layout, layout.place_of(rank))
        boxes = [
            (name, kind.dtype, kind.itemsize, kind.shape, box) for name, kind, box in share.boxes()
        ]
        assert boxes == own
    assert as_sets(place_parts(said)) == as_sets(place(pieces))


@given(cuts(), layouts, cuts(), layouts)
def test_plans_from_listings_move_what_must_be_moved(
    cut: dict[str, Cut | None],
    layout: Layout,
    new_cut: dict[str, Cut | None],
    new_layout: Layout,
) -> None:
    said, sources = shares(cut, layout)
    wanted, targets = shares(new_cut, new_layout)
    check_plan(whole_plan(place_parts(said), place_parts(wanted), ITEMSIZES), sources, targets)


def test_ranks_that_are_cut_alike_list_the_same() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, tp=2)
    cut = {name: Cut(None, 0 if shape else None) for name, shape in SHAPES.items()}
    assert len({id(share.listing) for share in shares(cut, layout)[0]}) == 1


def test_experts_are_cut_by_those_who_share_them_and_then_by_shards() -> None:
    """Seven experts over three ranks, and what each has over two: within experts, or of them."""
    layout, shape = Layout(dp_shard=6, ep=3), (7, 4)
    places = [layout.place_of(rank) for rank in range(6)]
    within = [box for place in places for box in Cut(None, 1, 0).boxes(shape, layout, place)]
    rows = [(0, 3), (3, 3), (6, 1)] * 2
    halves = [0, 0, 0, 2, 2, 2]
    assert within == [Box((at, half), (n, 2)) for (at, n), half in zip(rows, halves, strict=True)]
    of_them = [box for place in places for box in Cut(None, 0, 0).boxes(shape, layout, place)]
    assert [box.sizes[0] for box in of_them] == [2, 2, 1, 1, 1, 0]
    assert [box.offsets[0] for box in of_them] == [0, 3, 6, 2, 5, 7]
    for box, at in zip(within, places, strict=True):
        assert find_cut(shape, (box,), layout, at) == Cut(None, 1, 0)


def test_whoever_has_which_experts_lists_the_same() -> None:
    """A box for each run of them; where experts are cut, of those that a rank then has."""
    owners = (0, 0, 1, 0, 1, 1, 2)
    layout, shape = Layout(dp_shard=6, ep=3, owners=owners), (7, 4)
    places = [layout.place_of(rank) for rank in range(6)]
    within = [Cut(None, 1, 0).boxes(shape, layout, place) for place in places]
    assert within[0] == (Box((0, 0), (2, 2)), Box((3, 0), (1, 2)))
    assert within[4] == (Box((2, 2), (1, 2)), Box((4, 2), (2, 2)))
    of_them = [Cut(None, 0, 0).boxes(shape, layout, place) for place in places]
    assert of_them[3] == (Box((3, 0), (1, 4)),) and of_them[5] == (Box((7, 0), (0, 4)),)
    for boxes, at in zip(within, places, strict=True):
        listing = list_parts([("w", "float32", 4, shape, box) for box in boxes], layout, at)
        assert [*listing.tensors] == [("w", 0)] and listing.kinds[0].cut == Cut(None, 1, 0)


def test_a_box_that_no_cut_explains_is_listed_itself() -> None:
    odd, layout, at = Box((1,), (3,)), Layout(dp_shard=4), ShardPlace(0, 1, 0)
    assert find_cut((8,), (odd,), layout, at) is None
    assert list_parts([("w", "int8", 1, (8,), odd)], layout, at).kinds[0].cut == odd
    assert find_cut((8,), (Box((2,), (2,)),), layout, at) == Cut(None, 0)
