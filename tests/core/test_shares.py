"""Everyone's share together is the assignment: nobody is told less than it needs, or otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_ft.core import membership
from elastic_ft.core.assignment import Assignment, CheckpointRef, Keeper, Source, Tier
from elastic_ft.core.commands import Command, FormGeneration
from elastic_ft.core.events import Event
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.policy import Policy
from elastic_ft.core.shares import Share, shares
from elastic_ft.core.state import State
from elastic_ft.sim import simulate
from tests.core.script import member
from tests.sim.scenarios import make_scenario


def agrees(assignment: Assignment) -> None:
    """Put together from the shares, what matters of the assignment is there, and nothing else."""
    everyone = (*assignment.members, *assignment.donors)
    told = list(shares(assignment))
    assert [worker for worker, _ in told] == [m.worker for m in everyone]
    common = {share.participants for _, share in told} | {len(everyone)}
    assert len(common) == 1
    keeps: dict[int, set[int]] = {}
    for rank, buddies in enumerate(assignment.buddies):
        for buddy in buddies:
            keeps.setdefault(buddy, set()).add(rank)
    for participant, (worker, share) in enumerate(told):
        rank = assignment.rank_of(worker)
        assert (share.rank, share.participant) == (rank, participant)
        assert share.holds == (rank is not None and rank in assignment.holding)
        assert share.buddies == (() if rank is None else assignment.buddies[rank])
        assert set(share.keeps) == keeps.get(participant, set())
        assert (share.is_cut, share.layout) == (assignment.is_cut, assignment.layout)
        for step in (assignment.source.step, assignment.source.step + 1):
            assert share.computed_by(step) == assignment.computed_by(step)
    agree_on_source(assignment, [share for _, share in told])


def agree_on_source(assignment: Assignment, told: list[Share]) -> None:
    source = assignment.source
    workers = [m.worker for m in (*assignment.members, *assignment.donors)]
    for shard, holders in source.holders.items():
        living = [holder for holder, _ in holders if holder in workers]
        offering = [worker for worker, s in zip(workers, told, strict=True) if shard in s.has]
        assert sorted(offering) == sorted(set(living))
        for worker in offering:
            nearest = next(tier for holder, tier in holders if holder == worker)
            assert told[workers.index(worker)].has[shard] is nearest
        for share in told:
            assert share.source.holders.get(shard) == (None if living else holders)
            if not living and holders[0][1] is Tier.KEEPER:
                names = [keeper.name for keeper in share.keepers]
                assert holders[0][0].rpartition("/")[0] in names
    for share in told:
        assert (share.source.step, share.source.url) == (source.step, source.url)
        assert share.source.holders.keys() <= source.holders.keys()
        assert bool(source.holders) == bool(share.source.holders or any(s.has for s in told))


def assignments(seed: int, strategy: str) -> Iterator[Assignment]:
    made: list[Assignment] = []

    def decide(state: State, event: Event, policy: Policy) -> tuple[State, tuple[Command, ...]]:
        after, commands = membership.step(state, event, policy)
        made.extend(c.assignment for c in commands if isinstance(c, FormGeneration))
        return after, commands

    simulate(make_scenario(seed, strategy), decide=decide)  # type: ignore[arg-type]
    yield from made


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_shares_are_all_of_the_assignment(strategy: str) -> None:
    tiers: set[Tier] = set()
    for seed in range(30):
        for assignment in assignments(seed, strategy):
            agrees(assignment)
            tiers.add(assignment.source.tier)
    wanted = {Tier.LIVE, Tier.INITIAL, Tier.CHECKPOINT}
    assert tiers >= (wanted if strategy == "ddp" else wanted | {Tier.KEEPER})


def made(holders: dict[str, tuple[tuple[str, Tier], ...]], url: str = "") -> Assignment:
    members = (member("a", "n1"), member("b", "n2"))
    keepers = (Keeper("n1", ("h", 1)), Keeper("n2", ("h", 2)))
    layout = Layout(dp_shard=2)
    source = Source(7, Tier.PEER, layout.shard_space, holders, url, 3)
    donors = (member("c", "n3"),)
    return Assignment(4, members, donors, layout, source, ((1,), (0,)), "a test", keepers)


def test_each_offers_what_it_has_in_its_nearest_tier() -> None:
    one, other = "pp0.s0.tp0", "pp0.s1.tp0"
    holders = {
        one: (("a", Tier.LIVE), ("a", Tier.HOST), ("b", Tier.PEER)),
        other: (("c", Tier.HOST), ("keeper:n2/x", Tier.KEEPER)),
    }
    told = dict(shares(made(holders)))
    assert told["a"].has == {one: Tier.LIVE}
    assert told["b"].has == {one: Tier.PEER}
    assert told["c"].has == {other: Tier.HOST} and told["c"].rank is None
    assert all(not share.source.holders and not share.keepers for share in told.values())


def test_everyone_knows_who_has_what_no_participant_has() -> None:
    one, other = "pp0.s0.tp0", "pp0.s1.tp0"
    checkpoint = CheckpointRef(7, "s3://bucket/7", 3)
    elsewhere = {
        one: (("keeper:n2/x", Tier.KEEPER),),
        other: ((checkpoint.url, Tier.CHECKPOINT),),
    }
    told = dict(shares(made(elsewhere, checkpoint.url)))
    for share in told.values():
        assert share.source.holders == elsewhere and not share.has
        assert [keeper.node for keeper in share.keepers] == ["n2"]


def test_one_that_takes_no_part_has_no_share() -> None:
    with pytest.raises(KeyError):
        dict(shares(made({})))["d"]
