"""What each participant is told of an assignment: its own share of it. Pure.

An assignment names every member, holder and copy. One participant needs of that its own place, and
the few things that concern all: so a generation of N is O(N) to send, not O(N) to each. Nothing
is left to be known from the generation before, so nobody can have it wrong. Who the others are,
they tell each other as they form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from elastic_ft.core.assignment import Assignment, Basis, Keeper, Source, Tier, WorkerId
from elastic_ft.core.layouts.layout import Layout


@dataclass(frozen=True, slots=True)
class Share(Basis):
    """One participant's.

    Attributes:
        source: its ``holders`` are of the shards that no participant has.
        keepers: that are among those.
        members, participants: how many; members come first.
        holding: the first so many ranks keep snapshots in host memory.
        participant: index among all of them; a member's is its rank.
        has: shards of the source that it has, in its nearest tier.
        buddies: ranks that keep a copy of its shard.
        keeps: ranks of whose shards it keeps a copy.
    """

    generation: int
    layout: Layout
    source: Source
    keepers: tuple[Keeper, ...]
    members: int
    participants: int
    holding: int
    participant: int
    has: dict[str, Tier]
    buddies: tuple[int, ...]
    keeps: tuple[int, ...]

    @property
    def rank(self) -> int | None:
        """None for a donor."""
        return self.participant if self.participant < self.members else None

    @property
    def holds(self) -> bool:
        """Whether it keeps snapshots in host memory: steps commit once held there."""
        return self.participant < self.holding


def shares(assignment: Assignment) -> Iterator[tuple[WorkerId, Share]]:
    """Every participant's, in order: members by rank, then donors. Equal parts are one object."""
    everyone = [m.worker for m in (*assignment.members, *assignment.donors)]
    has: dict[WorkerId, dict[str, Tier]] = {worker: {} for worker in everyone}
    elsewhere = {}
    for shard, holders in assignment.source.holders.items():
        here = [(worker, tier) for worker, tier in holders if worker in has]
        for worker, tier in here:
            has[worker].setdefault(shard, tier)  # the nearest is first
        if not here:
            elsewhere[shard] = holders
    keeps: list[list[int]] = [[] for _ in everyone]
    for rank, buddies in enumerate(assignment.buddies):
        for buddy in buddies:
            keeps[buddy].append(rank)
    asked = {who[0][0].rpartition("/")[0] for who in elsewhere.values()}
    source = replace(assignment.source, holders=elsewhere)
    keepers = tuple(keeper for keeper in assignment.keepers if keeper.name in asked)
    members = len(assignment.members)
    holding = len(assignment.holding) if members else 0
    for participant, worker in enumerate(everyone):
        yield (
            worker,
            Share(
                assignment.generation,
                assignment.layout,
                source,
                keepers,
                members,
                len(everyone),
                holding,
                participant,
                has[worker],
                assignment.buddies[participant] if participant < members else (),
                tuple(keeps[participant]),
            ),
        )
