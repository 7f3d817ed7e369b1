"""Who has which experts after a change of the world: as few bytes move as can be."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from elastic_ft.core.assignment import Assignment
from elastic_ft.core.commands import Command
from elastic_ft.core.events import WorkerLost, WorkerReady
from elastic_ft.core.layouts.expert_owners import (
    HadBy,
    _Dealt,
    allot,
    experts_at,
    in_runs,
    part_of,
    runs_of,
    weigh,
)
from elastic_ft.core.layouts.layout import Layout, ShardPlace
from elastic_ft.core.policy import Policy
from elastic_ft.core.typed import decoder
from tests.core.script import Script, assignment_in, member

PARTS = 12  # of an expert


def fewest_moved(
    experts: int, layout: Layout, had: Sequence[set[tuple[int, int]]], parts: int = PARTS
) -> int:
    """Of all ways to deal experts evenly, by trying each; in parts, so many of each expert."""
    least, extras = divmod(experts, layout.ep)

    @cache
    def best(expert: int, dealt: tuple[int, ...]) -> int:
        if expert == experts:
            return 0
        full = sum(count > least for count in dealt)
        return min(
            lacking(expert, rank, layout, had, parts)
            + best(expert + 1, (*dealt[:rank], count + 1, *dealt[rank + 1 :]))
            for rank, count in enumerate(dealt)
            if count < least + (full < extras)
        )

    return best(0, (0,) * layout.ep)


def lacking(
    expert: int,
    owner: int,
    layout: Layout,
    had: Sequence[set[tuple[int, int]]],
    parts: int = PARTS,
) -> int:
    """What those who are to share an expert have not of it."""
    sharing = (r for r in range(layout.world_size) if at(layout, r)[1] == owner)
    size = parts // layout.expert_shards
    return sum(
        (expert, at(layout, r)[0] * size + n) not in had[r] for r in sharing for n in range(size)
    )


def parts_of(experts: int, layout: Layout, rank: int) -> set[tuple[int, int]]:
    shard, group = at(layout, rank)
    size = PARTS // layout.expert_shards
    parts = range(shard * size, (shard + 1) * size)
    return {(expert, part) for expert in experts_at(layout, experts, group) for part in parts}


def at(layout: Layout, rank: int) -> tuple[int, int]:
    return divmod(layout.place_of(rank).dp_shard, layout.ep)


@st.composite
def worlds(draw: st.DrawFn, most: int = 4) -> Layout:
    ep, shards = draw(st.integers(2, most)), draw(st.sampled_from([1, 1, 2, 3]))
    return Layout(dp_shard=ep * shards, ep=ep, dp_replicate=draw(st.sampled_from([1, 1, 2])))


@given(worlds(), worlds(), st.integers(1, 6), st.randoms(use_true_random=False), st.booleans())
def test_no_more_is_moved_than_must_be(
    former: Layout, layout: Layout, experts: int, chance: Random, copies: bool
) -> None:
    """Whoever is lost or joins, whatever the layouts, and whoever has copies of whose shards."""
    former = replace(former, owners=tuple(chance.choices(range(former.ep), k=experts)))
    everyone = [*range(former.world_size), *[None] * layout.world_size]
    held: list[HadBy] = []
    had: list[set[tuple[int, int]]] = []
    for rank, was in enumerate(chance.sample(everyone, layout.world_size)):
        had.append(set())
        if was is None:
            continue
        peer = (was + 1) % former.world_size if copies else was
        for of in dict.fromkeys((was, peer)):
            held.append((rank, former.place_of(of), of == was))
            had[-1] |= parts_of(experts, former, of)
    owners = allot(weigh(experts, layout, former, held))
    shared = [owners.count(rank) for rank in range(layout.ep)]
    assert max(shared) - min(shared) <= 1
    moved = sum(lacking(expert, owner, layout, had) for expert, owner in enumerate(owners))
    event(f"moved: {moved // PARTS} of {experts}")
    assert moved == fewest_moved(experts, layout, had)


@given(st.integers(2, 12), st.integers(2, 8), st.integers(2, 8), st.data())
def test_a_survivor_keeps_what_it_has_as_far_as_all_get_as_many(
    experts: int, ranks: int, after: int, data: st.DataObject
) -> None:
    former, layout = Layout(dp_shard=ranks, ep=ranks), Layout(dp_shard=after, ep=after)
    stay = data.draw(st.lists(st.integers(0, ranks - 1), unique=True, max_size=after))
    owners = allot(weigh(experts, layout, former, [*held_by(former, stay)]))
    most = -(-experts // after)
    for rank, was in enumerate(stay):
        before, now = (
            {*experts_at(of, experts, r)}
            for of, r in ((former, was), (replace(layout, owners=owners), rank))
        )
        assert len(before & now) >= min(len(before), most) - 1


def held_by(former: Layout, stay: Sequence[int]) -> Iterator[HadBy]:
    return ((rank, former.place_of(was), True) for rank, was in enumerate(stay))


def test_eight_experts_on_four_ranks_three_and_four_again() -> None:
    """Two move each way: those of the lost, and as many as the joiner is to have."""
    four, three = Layout(dp_shard=4, ep=4), Layout(dp_shard=3, ep=3)
    shrunk = replace(three, owners=allot(weigh(8, three, four, [*held_by(four, [0, 2, 3])])))
    assert shrunk.owners == (0, 0, 0, 1, 1, 1, 2, 2)
    grown = replace(four, owners=allot(weigh(8, four, shrunk, [*held_by(shrunk, [0, 1, 2])])))
    assert [experts_at(grown, 8, rank) for rank in range(3)] == [(0, 1), (3, 4), (6, 7)]
    assert experts_at(grown, 8, 3) == (2, 5)
    again = allot(weigh(8, four, grown, [*held_by(grown, range(4))]))
    assert again == grown.owners


def test_where_nothing_decides_ranks_have_runs() -> None:
    """Of a checkpoint, or where all have all; and as even as can be: DTensor leaves one out."""
    layout = Layout(dp_shard=5, ep=5)
    assert allot(weigh(8, layout, Layout(), [])) == (0, 0, 1, 1, 2, 2, 3, 4)
    everyone = [(rank, ShardPlace(0, 0, 0), True) for rank in range(5)]
    assert allot(weigh(8, layout, Layout(dp_replicate=5), everyone)) == (
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        4,
    )
    assert in_runs(8, 5) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert allot(weigh(8, Layout(dp_shard=4, ep=4), Layout(), [])) == in_runs(8, 4)


def test_hundreds_of_experts_on_many_ranks_are_dealt_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training is paused meanwhile: no best way is searched, and all still have as many."""
    monkeypatch.setattr(_Dealt, "_search", lambda self: pytest.fail("it was searched"))
    random = Random(7)
    weights = [[random.randrange(9) for _ in range(1024)] for _ in range(48)]
    counts = Counter(allot(weights))
    assert len(counts) == 48 and {*counts.values()} == {21, 22}


def test_shards_have_experts_too() -> None:
    """By FSDP2, which cuts their tensors along the first axis."""
    former, layout = Layout(dp_shard=4), Layout(dp_shard=3, ep=3)
    owners = allot(weigh(8, layout, former, [*held_by(former, [3, 0, 1])]))
    assert owners == (1, 1, 2, 2, 0, 1, 0, 0)


def test_parts_and_runs() -> None:
    assert [part_of(range(4), index, 3) for index in range(3)] == [range(2), range(2, 4), range(0)]
    assert runs_of([0, 1, 3, 6, 7]) == [(0, 2), (3, 1), (6, 2)] and runs_of([]) == []


# ------------------------------------------------------------------------------ in a job


def ready(script: Script, worker: str, experts: int = 8) -> list[Command]:
    return script.tell(WorkerReady, member(worker, f"n-{worker}"), experts=experts)


def pause_all(script: Script, step: int) -> list[Command]:
    """Every member that is alive answers with what it has."""
    commands: list[Command] = []
    for worker in [m.worker for m in script.assignment.members if m.worker in script.state.ready]:
        held = (script.live(worker, step), *script.copies(worker, step))
        commands += script.paused(worker, *held)
    return commands


def begun(experts: int = 8) -> Script:
    script = Script(Policy(min_workers=2, max_workers=4, strategy="fsdp", ep=4))
    for worker in "abcd":
        ready(script, worker, experts)
    script.resume()
    script.train(1, 2, 3)
    return script


def lose_b(script: Script) -> Assignment:
    script.tell(WorkerLost, "b", "killed")
    return assignment_in(pause_all(script, 3))


def test_the_assignment_says_who_has_which() -> None:
    script = begun()
    assert script.assignment.layout == Layout(dp_shard=4, ep=4), "runs, as long as all are there"
    shrunk = lose_b(script)
    assert (str(shrunk.layout), script.ranks) == ("fsdp3-ep3", ("a", "c", "d"))
    # c has a copy of what b had, and d of what c had: nothing needs to be sent.
    assert shrunk.layout.owners == (0, 0, 1, 1, 1, 2, 2, 2)
    assert "experts shared by 3, as 4 do not divide 3 shards, of which 0 of 8" in shrunk.reason
    script.resume()
    script.train(4)
    ready(script, "e")
    grown = assignment_in(pause_all(script, 4))
    assert (str(grown.layout), script.ranks) == ("fsdp4-ep4", ("a", "c", "d", "e"))
    for rank in range(3):
        assert {*experts_at(grown.layout, 8, rank)} <= {*experts_at(shrunk.layout, 8, rank)}
    spaces = {of.shard_space for of in (Layout(dp_shard=4, ep=4), grown.layout)}
    assert len(spaces) == 2, "shards of the first four are none of these"


def test_the_next_controller_deals_as_the_one_before() -> None:
    """It has the state as plain values, and the same events."""
    script, other = begun(), begun()
    plain = json.loads(json.dumps(asdict(other.assignment)))
    assert decoder(Assignment)(plain) == other.assignment
    other.state = replace(other.state, assignment=decoder(Assignment)(plain))
    assert lose_b(script) == lose_b(other)
    shrunk = script.assignment
    assert decoder(Assignment)(json.loads(json.dumps(asdict(shrunk)))) == shrunk


def test_workers_that_do_not_say_how_many_have_runs() -> None:
    """As in journals of earlier versions; nor do they decide anything by nonsense."""
    for experts in (0, -3, 10**12):
        assert lose_b(begun(experts)).layout == Layout(dp_shard=3, ep=3)
    old = {"dp_replicate": 1, "dp_shard": 4, "pp": 1, "tp": 1, "cp": 1, "ep": 4}
    assert decoder(Layout)(old) == Layout(dp_shard=4, ep=4)


def test_what_can_not_be_is_no_shard_space() -> None:
    for space in ("pp1.s4.tp1.ep2.0x1_2x1", "pp1.s4.tp1.ep2.0x9999", "pp1.s4.tp1.ep2._0x1"):
        with pytest.raises(ValueError, match=r"not a shard space|ranks that ep 2 has not"):
            Layout.of_shard_space(space)
    tracemalloc.start()
    Layout.of_shard_space("pp1.s9000000.tp1.ep9000000.0x1")  # it may be a stranger's
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
