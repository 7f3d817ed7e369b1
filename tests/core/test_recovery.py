"""Which step, from whom: examples, and a deliberately dumb second opinion."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.assignment import TIER_ORDER, CheckpointRef, Holding, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.source import RefusedSources, choose

TWO, THREE = Layout(dp_shard=2), Layout(dp_shard=3)
IN_MEMORY = (Tier.LIVE, Tier.HOST, Tier.KEEPER, Tier.PEER)
WORKERS = ("a", "b", "c", "d")


def held(layout: Layout, step: int, rank: int, tier: Tier, generation: int = 0) -> Holding:
    return Holding(step, layout.shard_space, layout.shard_of(rank), tier, generation)


# ------------------------------------------------------------------------------ choose


def test_nothing_held_starts_from_the_seed() -> None:
    source, why = choose({}, ())
    assert source == Source(0, Tier.INITIAL)
    assert why == "no state is held and no checkpoint is good"


def test_the_newest_whole_step_wins_and_the_reason_names_what_was_skipped() -> None:
    holdings = {
        "a": (held(TWO, 8, 0, Tier.LIVE), held(TWO, 7, 0, Tier.HOST)),
        "b": (held(TWO, 7, 1, Tier.LIVE),),
    }
    source, why = choose(holdings, (CheckpointRef(5, "s3://b/5"),))
    assert (source.step, source.tier) == (7, Tier.HOST)
    assert why == ("step 7 is complete in memory, farthest tier host; step 8 lacks pp0.s1.tp0")


def test_each_shards_holders_come_nearest_first_and_of_equals_by_name() -> None:
    tiers = {"a": Tier.PEER, "b": Tier.HOST, "c": Tier.LIVE, "d": Tier.LIVE}
    holdings = {worker: (held(Layout(), 5, 0, tier),) for worker, tier in tiers.items()}
    source, _ = choose(holdings, ())
    assert source.tier is Tier.LIVE
    (holders,) = source.holders.values()
    assert holders == (("c", Tier.LIVE), ("d", Tier.LIVE), ("b", Tier.HOST), ("a", Tier.PEER))


def test_memory_wins_over_a_checkpoint_of_the_same_step() -> None:
    holdings = {"a": (held(Layout(), 5, 0, Tier.PEER),)}
    assert choose(holdings, (CheckpointRef(5, "u"),))[0].tier is Tier.PEER
    assert choose(holdings, (CheckpointRef(6, "u"),))[0] == Source(6, Tier.CHECKPOINT, url="u")


def test_shards_that_no_memory_has_come_from_the_checkpoint_of_the_same_step() -> None:
    first, second = sorted(TWO.shards())
    holdings = {"a": (held(TWO, 5, 0, Tier.LIVE),), "b": (held(TWO, 5, 1, Tier.HOST),)}
    source, why = choose(holdings, (CheckpointRef(5, "u"),), frozenset({("b", 5, second)}))
    assert source == Source(
        5,
        Tier.CHECKPOINT,
        TWO.shard_space,
        {first: (("a", Tier.LIVE),), second: (("u", Tier.CHECKPOINT),)},
        "u",
    )
    assert why == f"step 5 is in memory but for {second}: from its checkpoint"
    older = choose(holdings, (CheckpointRef(4, "u"),), frozenset({("b", 5, second)}))[0]
    assert older == Source(4, Tier.CHECKPOINT, url="u")  # of another step: nothing is mixed


def test_the_cut_of_which_most_is_in_memory_is_completed() -> None:
    holdings = {
        "a": (held(TWO, 5, 0, Tier.LIVE), held(THREE, 5, 0, Tier.HOST)),
        "b": (held(THREE, 5, 1, Tier.PEER),),
    }
    assert choose(holdings, (CheckpointRef(5, "u"),))[0].space == THREE.shard_space


def test_near_memory_wins_over_far_memory_of_the_same_step() -> None:
    """Old snapshots of two shards against the live state of three."""
    holdings = {
        "a": (held(TWO, 5, 0, Tier.HOST), held(THREE, 5, 0, Tier.LIVE)),
        "b": (held(TWO, 5, 1, Tier.HOST), held(THREE, 5, 1, Tier.LIVE)),
        "c": (held(THREE, 5, 2, Tier.LIVE),),
    }
    assert choose(holdings, ())[0].space == THREE.shard_space


def test_shards_of_different_cuts_are_not_mixed() -> None:
    holdings = {"a": (held(TWO, 5, 0, Tier.LIVE),), "b": (held(THREE, 5, 1, Tier.LIVE),)}
    assert choose(holdings, ())[0].tier is Tier.INITIAL


def test_states_of_two_histories_are_not_mixed() -> None:
    """Step 5 was trained twice: its halves are of different generations."""
    holdings = {
        "a": (held(TWO, 5, 0, Tier.LIVE, 2), held(TWO, 4, 0, Tier.HOST, 1)),
        "b": (held(TWO, 5, 1, Tier.LIVE, 3), held(TWO, 4, 1, Tier.HOST, 1)),
    }
    source, why = choose(holdings, ())
    assert (source.step, source.generation) == (4, 1)
    assert why.count("step 5 lacks") == 2
    both = {**holdings, "c": (held(TWO, 5, 1, Tier.PEER, 2), held(TWO, 5, 0, Tier.PEER, 3))}
    source, _ = choose(both, ())
    assert (source.step, source.generation) == (5, 3)  # what was trained again counts
    assert source.holders == {
        TWO.shard_of(0): (("c", Tier.PEER),),
        TWO.shard_of(1): (("b", Tier.LIVE),),
    }


def test_a_checkpoint_completes_no_other_history() -> None:
    holdings = {"a": (held(TWO, 5, 0, Tier.LIVE, 2),)}
    ref = CheckpointRef(5, "u", 1)
    assert choose(holdings, (ref,))[0] == Source(5, Tier.CHECKPOINT, url="u", generation=1)
    filled = choose(holdings, (replace(ref, generation=2),))[0]
    assert filled.holders[TWO.shard_of(0)] == (("a", Tier.LIVE),)
    assert filled.generation == 2


def test_a_refused_copy_is_left_out_and_live_state_is_not() -> None:
    holdings = {"a": (held(Layout(), 5, 0, Tier.LIVE), held(Layout(), 4, 0, Tier.HOST))}
    refs = (CheckpointRef(3, "new"), CheckpointRef(2, "old"))
    assert choose(holdings, refs, frozenset({("a", 5, "")}))[0].step == 5
    only_host = {"a": holdings["a"][1:]}
    source, _ = choose(only_host, refs, frozenset({("a", 4, ""), ("new", 3, "")}))
    assert source == Source(2, Tier.CHECKPOINT, url="old")


def test_one_damaged_shard_does_not_cost_the_holders_others() -> None:
    holdings = {
        "a": (held(TWO, 5, 0, Tier.HOST), held(TWO, 5, 1, Tier.PEER)),
        "b": (held(TWO, 5, 0, Tier.PEER),),
    }
    refused = frozenset({("a", 5, TWO.shard_of(0))})
    source, _ = choose(holdings, (), refused)
    assert source.holders == {
        TWO.shard_of(0): (("b", Tier.PEER),),
        TWO.shard_of(1): (("a", Tier.PEER),),
    }


holdings_of_workers = st.dictionaries(
    st.sampled_from(WORKERS),
    st.lists(
        st.builds(
            held,
            st.sampled_from([Layout(), TWO, THREE]),
            st.integers(0, 3),
            st.just(0),
            st.sampled_from(IN_MEMORY),
            st.integers(0, 1),
        ).flatmap(
            lambda h: st.sampled_from(sorted(Layout.of_shard_space(h.space).shards())).map(
                lambda shard: replace(h, shard=shard)
            )
        ),
        max_size=6,
        unique=True,
    ),
    max_size=4,
)
checkpoints = st.lists(st.integers(1, 4), unique=True, max_size=2).map(
    lambda steps: tuple(CheckpointRef(s, f"u{s}") for s in sorted(steps, reverse=True))
)
refusals = st.frozensets(
    st.one_of(
        st.tuples(st.sampled_from([f"u{step}" for step in range(1, 5)]), st.integers(1, 4)).map(
            lambda named: (*named, "")
        ),
        st.tuples(
            st.sampled_from(WORKERS),
            st.integers(0, 4),
            st.sampled_from(["", *sorted(THREE.shards())]),
        ),
    ),
    max_size=4,
)


def every_source(
    holdings: dict[str, list[Holding]],
    refs: tuple[CheckpointRef, ...],
    refused: RefusedSources,
) -> list[tuple[int, int, int]]:
    """(step, the generation that computed it, -farthest tier) of each way there is to get a whole
    state, found by trying all."""
    good = [
        (worker, h)
        for worker, some in holdings.items()
        for h in some
        if h.tier is Tier.LIVE or not refused & {(worker, h.step, h.shard), (worker, h.step, "")}
    ]
    found = [(0, 0, -TIER_ORDER.index(Tier.INITIAL))]
    for ref in refs:
        if (ref.url, ref.step, "") not in refused:
            found.append((ref.step, ref.generation, -TIER_ORDER.index(Tier.CHECKPOINT)))
    for layout in (Layout(), TWO, THREE):
        for picked in itertools.combinations(good, len(layout.shards())):
            states = {(h.step, h.generation) for _, h in picked}
            spaces = {h.space for _, h in picked}
            shards = {h.shard for _, h in picked}
            if len(states) == 1 and spaces == {layout.shard_space} and shards == layout.shards():
                farthest = max(TIER_ORDER.index(h.tier) for _, h in picked)
                found.append((*states.pop(), -farthest))
    return found


@given(holdings_of_workers, checkpoints, refusals)
def test_choose_agrees_with_trying_every_combination(
    holdings: dict[str, list[Holding]],
    refs: tuple[CheckpointRef, ...],
    refused: RefusedSources,
) -> None:
    source, why = choose(holdings, refs, refused)
    best = max(every_source(holdings, refs, refused))
    if best[0] == 0:
        assert source == Source(0, Tier.INITIAL)  # step 0 is never moved, it is made
        return
    assert (source.step, source.generation, -TIER_ORDER.index(source.tier)) == best
    assert why
    assert source.url == (f"u{source.step}" if source.tier is Tier.CHECKPOINT else "")
    for shard, who in source.holders.items():
        tiers = [TIER_ORDER.index(tier) for _, tier in who]
        assert tiers == sorted(tiers)
        for holder, tier in who:
            if tier is Tier.CHECKPOINT:
                assert (holder, len(who)) == (source.url, 1)
            else:
                of = Holding(source.step, source.space, shard, tier, source.generation)
                assert of in holdings[holder]
    least = min(missing_shares(holdings, refused, source)) if source.url else 0.0
    assert read_share(source) == pytest.approx(least)


def read_share(source: Source) -> float:
    """How much of the state is read from a checkpoint."""
    if not source.holders:
        return 1.0
    read = [who for who in source.holders.values() if who[0][1] is Tier.CHECKPOINT]
    return len(read) / len(source.holders)


def missing_shares(
    holdings: dict[str, list[Holding]], refused: RefusedSources, source: Source
) -> list[float]:
    """By cut of the state, the part of the source's step that no memory has."""
    good = {
        (h.space, h.shard)
        for worker, some in holdings.items()
        for h in some
        if (h.step, h.generation) == (source.step, source.generation)
        and (h.tier is Tier.LIVE or not refused & {(worker, h.step, h.shard), (worker, h.step, "")})
    }
    return [
        1 - sum(space == layout.shard_space for space, _ in good) / len(layout.shards())
        for layout in (Layout(), TWO, THREE)
    ]
