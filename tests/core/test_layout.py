"""Rank arithmetic, and the layout that a world of any size gets."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.layouts.layout import (
    DIMENSIONS,
    MODEL_DIMENSIONS,
    ContextMethod,
    Coordinates,
    Layout,
    LayoutWish,
    count_stages,
    plan_layout,
    split_layers,
    stages_of,
)


def wished(strategy: str, shard_size: int | None, tp: int = 1, pp: int = 1) -> LayoutWish:
    return LayoutWish(strategy=strategy, shard_size=shard_size, tp=tp, pp=pp)  # type: ignore[arg-type]


sizes = st.integers(1, 3)
plain = st.builds(Layout, *[sizes for _ in range(5)])
sharing = st.builds(
    lambda replicas, shards, ep: Layout(dp_replicate=replicas, dp_shard=shards * ep, ep=ep),
    *[sizes for _ in range(3)],
)
layouts = st.one_of(plain, sharing)


@given(layouts)
def test_ranks_are_numbered_row_major_over_pp_replicate_shard_cp_tp(layout: Layout) -> None:
    expected = [
        (pp, replicate, shard, cp, tp)
        for pp in range(layout.pp)
        for replicate in range(layout.dp_replicate)
        for shard in range(layout.dp_shard)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    ]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == expected


@given(layouts)
def test_shards_are_what_is_left_when_replicas_are_taken_as_one(layout: Layout) -> None:
    shards = [layout.shard_of(rank) for rank in range(layout.world_size)]
    assert len(layout.shards()) == layout.world_size // layout.dp_replicate
    assert all(shards.count(shard) == layout.dp_replicate for shard in layout.shards())
    same = Layout.of_shard_space(layout.shard_space)
    assert (same.shards(), same.shard_space) == (layout.shards(), layout.shard_space)


@given(layouts)
def test_peers_in_one_model_copy_read_the_same_samples(layout: Layout) -> None:
    readers = [layout.data_rank(rank) for rank in range(layout.world_size)]
    assert set(readers) == set(range(layout.data_parallel_size))
    assert all(readers.count(r) == layout.pp * layout.cp * layout.tp for r in set(readers))


def test_tensor_parallel_peers_are_neighbours() -> None:
    layout = Layout(dp_shard=2, tp=2)
    assert [layout.shard_of(rank) for rank in range(4)] == [
        "pp0.s0.tp0",
        "pp0.s0.tp1",
        "pp0.s1.tp0",
        "pp0.s1.tp1",
    ]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(), "ddp1"),
        (Layout(dp_replicate=4), "ddp4"),
        (Layout(dp_shard=4), "fsdp4"),
        (Layout(dp_replicate=2, dp_shard=3), "hsdp2x3"),
        (Layout(pp=2, dp_shard=2, tp=2), "pp2-fsdp2-tp2"),
        (Layout(dp_replicate=2, dp_shard=3, cp=2, tp=4), "hsdp2x3-cp2-tp4"),
        (Layout(cp=3), "ddp1-cp3"),
        (Layout(dp_shard=4, ep=2), "fsdp4-ep2"),
        (Layout(dp_replicate=2, dp_shard=3, ep=3), "hsdp2x3-ep3"),
    ],
)
def test_names(layout: Layout, name: str) -> None:
    assert str(layout) == name


@given(layouts)
def test_a_layout_is_found_again_by_its_name(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("world_size", "shard_size", "wanted"),
    [
        (8, 4, "hsdp2x4"),
        (6, 4, "hsdp2x3"),  # 4 do not divide 6
        (4, 4, "fsdp4"),
        (3, 4, "fsdp3"),
        (5, 2, "fsdp5"),  # nothing divides 5: the state of one replica must fit
        (6, None, "fsdp6"),
        (1, 2, "ddp1"),
    ],
)
def test_hsdp_takes_the_largest_number_of_shards_that_fits(
    world_size: int, shard_size: int | None, wanted: str
) -> None:
    assert str(plan_layout(wished("hsdp", shard_size), world_size)[0]) == wanted


@given(st.sampled_from(["ddp", "fsdp", "hsdp"]), st.integers(1, 64), st.integers(1, 16))
def test_every_world_gets_a_layout_of_its_size(strategy: str, world: int, shards: int) -> None:
    layout, why = plan_layout(wished(strategy, shards), world)
    assert layout.world_size == world
    assert why.startswith(strategy)
    if strategy == "ddp":
        assert len(layout.shards()) == 1
    if strategy == "fsdp":
        assert len(layout.shards()) == world


@pytest.mark.parametrize(
    ("strategy", "world_size", "tp", "pp", "wanted"),
    [
        ("fsdp", 8, 2, 2, "pp2-fsdp2-tp2"),
        ("fsdp", 6, 2, 2, "fsdp3-tp2"),  # tp is kept before pp
        ("fsdp", 3, 2, 2, "fsdp3"),
        ("fsdp", 4, 1, 3, "pp2-fsdp2"),
        ("fsdp", 3, 1, 3, "pp3-ddp1"),
        ("ddp", 6, 4, 1, "ddp3-tp2"),  # a divisor of what was asked
        ("hsdp", 8, 2, 1, "hsdp2x2-tp2"),
        ("ddp", 1, 8, 8, "ddp1"),
    ],
)
def test_degrades_by_rule(strategy: str, world_size: int, tp: int, pp: int, wanted: str) -> None:
    layout, why = plan_layout(wished(strategy, 2, tp, pp), world_size)
    assert str(layout) == wanted
    assert ("does not divide" in why) == ((layout.tp, layout.pp) != (tp, pp))


@given(
    st.sampled_from(["ddp", "fsdp", "hsdp"]),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 16),
)
def test_no_worker_idles(strategy: str, world: int, tp: int, pp: int) -> None:
    layout, _ = plan_layout(wished(strategy, 2, tp, pp), world)
    assert layout.world_size == world
    assert tp % layout.tp == 0
    assert layout.pp <= pp
    if world % (tp * pp) == 0:
        assert (layout.tp, layout.pp) == (tp, pp)


@pytest.mark.parametrize(
    ("world_size", "ep", "wanted"),
    [
        (4, 2, "fsdp4-ep2"),
        (3, 2, "fsdp3-ep3"),  # as near as none at all, by ratio nearer
        (3, 4, "fsdp3-ep3"),
        (6, 4, "fsdp6-ep3"),
        (7, 8, "fsdp7-ep7"),
        (17, 8, "fsdp17"),  # more than twice as many would leave ranks without experts
        (62, 8, "fsdp62-ep2"),
        (1, 4, "ddp1"),
    ],
)
def test_experts_are_shared_by_the_divisor_that_is_nearest(
    world_size: int, ep: int, wanted: str
) -> None:
    layout, why = plan_layout(LayoutWish(strategy="fsdp", ep=ep), world_size)
    assert str(layout) == wanted
    assert ("experts not shared" in why) == (layout.ep == 1)
    assert (f"as {ep} do not divide {world_size} shards" in why) == (layout.ep != ep)


def test_experts_are_shared_within_a_replica() -> None:
    layout, why = plan_layout(LayoutWish(strategy="hsdp", shard_size=4, ep=2), 8)
    assert (str(layout), layout.expert_shards) == ("hsdp2x4-ep2", 2)
    assert why == "hsdp: 2 replicas of 4 shards, as asked, experts shared by 2"


def test_experts_that_are_shared_out_are_another_cut() -> None:
    plain, sharing = Layout(dp_shard=4), Layout(dp_shard=4, ep=2)
    assert plain.shards() == sharing.shards() and plain.mesh_dims() == sharing.mesh_dims()
    assert (plain.shard_space, sharing.shard_space) == ("pp1.s4.tp1", "pp1.s4.tp1.ep2")
    assert Layout.of_shard_space("pp1.s4.tp1.ep2") == sharing
    dealt = Layout(dp_shard=4, ep=2, owners=(0, 1, 1, 0))
    assert dealt.shard_space == "pp1.s4.tp1.ep2.0x1_1x2_0x1"
    assert Layout.of_shard_space(dealt.shard_space) == dealt
    assert (str(dealt), dealt.shards()) == (str(sharing), sharing.shards())


@pytest.mark.parametrize(
    ("method", "world_size", "cp", "wanted"),
    [
        ("ulysses", 8, 4, "fsdp2-cp4"),
        ("ulysses", 3, 4, "fsdp3"),  # heads that 4 divides need not divide by 3
        ("ulysses", 6, 4, "fsdp3-cp2"),
        ("ulysses", 3, 6, "ddp1-cp3"),
        ("auto", 3, 4, "ddp1-cp3"),
        ("all_gather", 3, 4, "ddp1-cp3"),
    ],
)
def test_ranks_that_trade_heads_are_as_many_as_divide_them(
    method: ContextMethod, world_size: int, cp: int, wanted: str
) -> None:
    wish = LayoutWish(strategy="fsdp", cp=cp, cp_method=method)
    layout, why = plan_layout(wish, world_size)
    assert str(layout) == wanted
    assert ("ulysses takes divisors of cp" in why) is (method == "ulysses" and layout.cp != cp)


@pytest.mark.parametrize(("cp", "ep", "together"), [(2, 1, 2), (2, 4, 4), (4, 2, 4), (2, 3, 6)])
def test_who_shares_positions_and_experts_belongs_together(cp: int, ep: int, together: int) -> None:
    assert Layout(dp_shard=6, cp=cp, ep=ep).ranks_together == together


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 7))
def test_layers_are_split_as_evenly_as_can_be(costs: list[int], parts: int) -> None:
    parts = min(parts, len(costs))
    found = split_layers(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(found)
    assert len(found) == parts
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert max(sum(costs[i] for i in part) for part in found) == best


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"])
def test_every_stage_is_somewhere(schedule: str) -> None:
    found = [stage for rank in range(3) for stage in stages_of(rank, 3, schedule)]
    assert sorted(found) == list(range(count_stages(3, schedule)))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Layout(dp_shard=0)
    with pytest.raises(ValueError, match="outside layout"):
        Layout(dp_shard=2).coordinates(2)
    with pytest.raises(ValueError, match="at least one rank"):
        plan_layout(LayoutWish(), 0)
    with pytest.raises(ValueError, match="not a layout"):
        Layout.parse("fsdp2-pp2")
    for space in ("s3", "pp1.s4.tp1.epx"):
        with pytest.raises(ValueError, match="not a shard space"):
            Layout.of_shard_space(space)
    with pytest.raises(ValueError, match="ep 2 does not divide 3 shards"):
        Layout(dp_shard=3, ep=2)


@given(layouts)
def test_each_batch_is_counted_by_one_of_those_who_share_it(layout: Layout) -> None:
    ranks = range(layout.world_size)
    counting = [layout.data_rank(rank) for rank in ranks if layout.counts_samples(rank)]
    assert sorted(counting) == list(range(layout.data_parallel_size))


@given(layouts)
def test_a_layout_answers_by_its_dimensions(layout: Layout) -> None:
    assert layout.sizes == tuple(getattr(layout, name) for name in DIMENSIONS)
    assert Coordinates._fields == DIMENSIONS
    assert {*MODEL_DIMENSIONS} == {f.name for f in fields(LayoutWish)} & {*DIMENSIONS}
    assert layout.is_cut == (len(layout.shards()) > 1)


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (Layout(), {"dp_shard": 1}),  # a mesh has one dimension at least
        (Layout(dp_replicate=2), {"dp_replicate": 2}),
        (Layout(dp_replicate=2, dp_shard=3), {"dp_replicate": 2, "dp_shard": 3}),
        (Layout(tp=2), {"dp_shard": 1, "tp": 2}),  # FSDP2 is told of one to shard over
        (Layout(pp=2, dp_replicate=2), {"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
    ],
)
def test_a_mesh_has_the_dimensions_that_are_used(layout: Layout, wanted: dict[str, int]) -> None:
    assert list(layout.mesh_dims().items()) == list(wanted.items())
