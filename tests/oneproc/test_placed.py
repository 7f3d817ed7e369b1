"""Who has what, told by everyone to everyone: little is said, and all plans fit together."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.forming import World, lacking_bytes, received_bytes, shapes_of
from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.placement import Cut, Listing, list_parts
from elastic_ft.core.sharding import Box
from elastic_ft.core.typed import decoder
from elastic_ft.errors import GroupBroken
from elastic_ft.models.decoder import PRESETS
from elastic_ft.state.placed import Listed, Told
from elastic_ft.transport.messages import Packed, pack, unpack

SHAPES = shapes_of(PRESETS["decoder-1m"])


def formed(before: Layout, after: Layout, planning: set[int]) -> World:
    world = World(SHAPES, before, after)
    world.form(planning)
    return world


@pytest.mark.parametrize("of", ["fsdp", "ddp"])
def test_the_store_carries_as_much_for_each_participant_of_a_large_world(of: str) -> None:
    """Everyone's boxes to everyone would be 16 times as much for 4 times as many."""

    def nbytes(ranks: int) -> int:
        worlds = [
            Layout(**{"dp_shard" if of == "fsdp" else "dp_replicate": n})
            for n in (ranks, ranks - 1)
        ]
        return formed(worlds[0], worlds[1], set()).store.bytes

    few, many = nbytes(8), nbytes(32)
    assert many < 6 * few
    assert many < 32 * 10_000


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(dp_shard=8), Layout(dp_shard=7)),
        (Layout(dp_shard=7), Layout(dp_shard=8)),
        (Layout(3, 4), Layout(2, 4)),
        (Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=3)),
        (Layout(dp_replicate=5), Layout(dp_replicate=8)),
    ],
    ids=lambda layout: str(layout),
)
def test_what_one_sends_another_receives_and_nobody_lacks_anything(
    before: Layout, after: Layout
) -> None:
    everyone = set(range(max(before.world_size, after.world_size)))
    world = formed(before, after, everyone)
    sent = Counter(copy for number in everyone for copy in world.plans[number].sends)
    received = Counter(copy for number in everyone for copy in world.plans[number].receives)
    assert sent == received
    assert set(sent.values()) <= {1}
    for number in everyone:
        assert received_bytes(world, number) == lacking_bytes(world, number)


def test_a_listing_arrives_as_it_was_sent() -> None:
    layout, odd = Layout(dp_shard=4, tp=2), Box((1,), (2,))
    parts = [
        ("matrix", "float32", 4, (8, 6), *Cut(1, 0).boxes((8, 6), layout, ShardPlace(0, 1, 1))),
        ("odd", "bfloat16", 2, (8,), odd),
        ("scalar", "float32", 4, (), Box((), ())),
    ]
    listing = list_parts(parts, layout, ShardPlace(0, 1, 1))
    assert [kind.cut for kind in listing.kinds] == [Cut(1, 0), odd, Cut(None, None)]
    assert decoder(Listing)(unpack(pack(Packed(listing)))) == listing


def test_a_listing_that_can_not_be_is_no_reason_to_end() -> None:
    world = World(SHAPES, Layout(), Layout())
    torn = Listing((), (("t", 3),))
    with pytest.raises(GroupBroken, match="what a participant says it has can't be"):
        Told(world.ranks[0], {"x": torn}, [Listed((), "x")]).placed()
