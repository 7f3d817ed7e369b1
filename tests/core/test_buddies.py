"""Who keeps copies: examples, what they survive, and a deliberately dumb second opinion."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.assignment import Member
from elastic_ft.core.buddies import choose_buddies
from elastic_ft.core.layouts.layout import Layout, LayoutWish, plan_layout
from tests.core.script import member

TWO = Layout(dp_shard=2)


def people(*nodes: str) -> list[Member]:
    return [member(f"w{rank}", node) for rank, node in enumerate(nodes)]


def test_copies_go_to_another_node_and_are_spread() -> None:
    members = people("n1", "n1", "n2", "n2")
    buddies = choose_buddies(members, Layout(dp_shard=4), copies=2)
    assert buddies == ((2,), (3,), (0,), (1,))


def test_on_one_node_the_copy_survives_a_process_at_least() -> None:
    assert choose_buddies(people("n1", "n1"), TWO, copies=2) == ((1,), (0,))


def test_replicas_on_two_nodes_are_copies_of_each_other() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)  # ranks 0 and 2 hold one shard, 1 and 3 the other
    assert choose_buddies(people("n1", "n1", "n2", "n2"), layout, copies=2) == ((),) * 4
    assert choose_buddies(people("n1", "n2", "n1", "n3"), layout, copies=2) == ((1,), (), (3,), ())


def test_whole_replicas_need_no_copies() -> None:
    assert choose_buddies(people("n1", "n1"), Layout(dp_replicate=2), copies=2) == ((), ())


def test_nobody_to_give_it_to_or_not_wanted() -> None:
    assert choose_buddies(people("n1"), Layout(), copies=2) == ((),)
    assert choose_buddies(people("n1", "n2"), TWO, copies=1) == ((), ())


def test_three_copies_are_on_three_nodes_and_evenly_spread() -> None:
    members = people("n1", "n2", "n3", "n4")
    buddies = choose_buddies(members, Layout(dp_shard=4), copies=3)
    assert all(len({rank, *who}) == 3 for rank, who in enumerate(buddies))
    assert Counter(b for who in buddies for b in who) == dict.fromkeys(range(4), 2)


def test_three_copies_where_there_are_two_nodes_are_two() -> None:
    """A second copy on a node dies with the first."""
    members = people("n1", "n1", "n2", "n2")
    assert choose_buddies(members, Layout(dp_shard=4), copies=3) == ((2,), (3,), (0,), (1,))


def test_copies_go_to_other_failure_domains_first() -> None:
    members = [
        replace(member(f"w{rank}", f"n{rank}"), domain=rack)
        for rank, rack in enumerate(["east", "east", "west", "west"])
    ]
    buddies = choose_buddies(members, Layout(dp_shard=4), copies=2)
    assert all(members[b].domain != members[r].domain for r, (b,) in enumerate(buddies))
    assert sorted(b for who in buddies for b in who) == [0, 1, 2, 3]
    buddies = choose_buddies(members, Layout(dp_shard=4), copies=3)
    for rank, who in enumerate(buddies):
        assert {members[h].domain for h in (rank, *who)} == {"east", "west"}


def test_a_neighbour_in_ones_own_domain_is_better_than_no_copy() -> None:
    members = [replace(m, domain="rack") for m in people("n1", "n2")]
    assert choose_buddies(members, TWO, copies=2) == ((1,), (0,))


worlds = st.lists(st.sampled_from(["n1", "n2", "n3", "n4", "n5"]), min_size=2, max_size=8)
strategies = st.sampled_from(["fsdp", "hsdp"])


@given(
    worlds,
    st.lists(st.sampled_from(["", "east", "west"]), min_size=5, max_size=5),
    strategies,
    st.sampled_from([None, 2, 3, 4]),
    st.integers(2, 4),
)
def test_with_r_copies_any_r_minus_one_losses_leave_every_shard(
    nodes: list[str], racks: list[str], strategy: str, shard_size: int | None, copies: int
) -> None:
    members = [replace(m, domain=racks[int(m.node[1:]) - 1]) for m in people(*nodes)]
    layout, _ = plan_layout(LayoutWish(strategy=strategy, shard_size=shard_size), len(members))  # type: ignore[arg-type]
    buddies = choose_buddies(members, layout, copies)
    holds = {rank: {layout.shard_of(rank)} for rank in range(len(members))}
    for owner, who in enumerate(buddies):
        assert len({owner, *who}) == 1 + len(who)
        for buddy in who:
            holds[buddy].add(layout.shard_of(owner))
    if len(set(nodes)) == 1:
        groups = [{rank} for rank in holds]  # a process at least
    else:
        several = itertools.combinations(set(nodes), min(copies, len(set(nodes))) - 1)
        groups = [{r for r in holds if nodes[r] in lost} for lost in several]
    for lost in groups:
        left = set().union(*(shards for rank, shards in holds.items() if rank not in lost))
        assert left == layout.shards()


@given(st.integers(2, 8), st.integers(1, 2), st.integers(2, 4))
def test_copies_are_spread_evenly_where_nodes_are_equal(
    nodes: int, per_node: int, copies: int
) -> None:
    members = people(*(f"n{node}" for node in range(nodes) for _ in range(per_node)))
    buddies = choose_buddies(members, Layout(dp_shard=len(members)), copies)
    kept = Counter(b for who in buddies for b in who)
    assert set(kept.values()) == {min(copies, nodes) - 1}
    assert len(kept) == len(members)


def dumb(members: list[Member], layout: Layout, copies: int) -> tuple[tuple[int, ...], ...]:
    """Looks at everybody for every copy."""
    count, kept, found = len(members), Counter[int](), []
    for rank in range(count):
        shard = layout.shard_of(rank)
        holding = [r for r in range(count) if layout.shard_of(r) == shard]
        chosen: list[int] = []
        while len({members[h].node for h in holding}) < copies and len(layout.shards()) > 1:
            nodes = {members[h].node for h in holding}
            domains = {members[h].domain for h in holding if members[h].domain}
            if len({member.domain for member in members} - {""}) < 2:
                domains = set()  # nobody is known to be elsewhere
            others = [r for r in range(count) if members[r].node not in nodes]
            if not others and len(holding) == 1:
                others = [r for r in range(count) if r != rank]
            if not others:
                break
            best = min(
                others,
                key=lambda r: (members[r].domain in domains, kept[r], (r - rank) % count),
            )
            holding.append(best)
            chosen.append(best)
            kept[best] += 1
        found.append(tuple(chosen))
    return tuple(found)


@given(
    st.lists(st.sampled_from([f"n{i}" for i in range(7)]), min_size=2, max_size=24),
    st.lists(st.sampled_from(["", "east", "east", "west", "north"]), min_size=7, max_size=7),
    strategies,
    st.sampled_from([None, 2, 3, 4]),
    st.integers(2, 4),
)
def test_as_if_everybody_were_looked_at_for_every_copy(
    nodes: list[str], racks: list[str], strategy: str, shard_size: int | None, copies: int
) -> None:
    members = [replace(m, domain=racks[int(m.node[1:])]) for m in people(*nodes)]
    layout, _ = plan_layout(LayoutWish(strategy=strategy, shard_size=shard_size), len(members))  # type: ignore[arg-type]
    assert choose_buddies(members, layout, copies) == dumb(members, layout, copies)


def test_of_nested_failure_domains_the_outermost_counts() -> None:
    """Two pods of two racks each: a copy goes to the other pod, whichever rack is next."""
    where = ["p1/r1", "p1/r2", "p2/r1", "p2/r2"]
    members = [
        replace(m, domain=where[int(m.node[1:]) - 1]) for m in people("n1", "n2", "n3", "n4")
    ]
    buddies = choose_buddies(members, Layout(dp_shard=4), 2)
    pods = [domain.partition("/")[0] for domain in where]
    assert all(pods[buddy] != pods[rank] for rank, (buddy,) in enumerate(buddies))
    one_pod = [replace(m, domain=m.domain.replace("p2", "p1")) for m in members]
    racks = [m.domain for m in one_pod]
    for rank, (buddy,) in enumerate(choose_buddies(one_pod, Layout(dp_shard=4), 2)):
        assert racks[buddy] != racks[rank]


def test_a_node_without_labels_is_no_failure_domain() -> None:
    """Else it would keep a copy of everyone's."""
    where = ["zone/r1", "zone/r2", "zone/r1", "", "/r2"]
    members = [
        replace(m, domain=where[int(m.node[1:]) - 1]) for m in people("n1", "n2", "n3", "n4", "n5")
    ]
    buddies = choose_buddies(members, Layout(dp_shard=5), 2)
    assert sorted(buddy for (buddy,) in buddies) == [0, 1, 2, 3, 4]
