"""Who keeps a second copy of whose shard. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain

from elastic_ft.core.events import Member
from elastic_ft.core.layout import Layout, shard_names


def choose_buddies(
    members: Sequence[Member], layout: Layout, copies: int
) -> tuple[tuple[int, ...], ...]:
    """Returns, per rank, the ranks that keep a copy of its shard, so that ``copies`` nodes have it.

    Replicas on several nodes count as copies, and a state that every member holds whole needs
    none: a copy of it survives no more. Copies go to nodes that have none yet, first to other
    failure domains, each worker keeping as few as can be. Where there are too few nodes, one copy
    goes to another worker all the same: it survives a process.
    """
    if copies < 2 or len(members) < 2 or len(layout.shards()) == 1:
        return ((),) * len(members)
    shards = shard_names(layout)
    replicas: dict[str, list[int]] = {}
    for rank, shard in enumerate(shards):
        replicas.setdefault(shard, []).append(rank)
    nodes_of = {shard: {members[r].node for r in ranks} for shard, ranks in replicas.items()}
    kept = _Kept(len(members))
    domains = {member.domain for member in members}
    buddies = []
    for rank, shard in enumerate(shards):
        chosen: list[int] = []
        if len(nodes_of[shard]) < copies:
            nodes = set(nodes_of[shard])
            while len(nodes) < copies:
                holding = [*replicas[shard], *chosen]
                buddy = _next_buddy(members, rank, holding, nodes, domains, kept)
                if buddy is None:
                    break
                chosen.append(buddy)
                kept.add(buddy)
                nodes.add(members[buddy].node)
        buddies.append(tuple(chosen))
    return tuple(buddies)


class _Kept:
    """How many copies each rank keeps by now, and the ranks that keep fewest, in order."""

    def __init__(self, count: int) -> None:
        self.copies = [0] * count
        self._least, self._fewest = list(range(count)), 0

    def add(self, rank: int) -> None:
        self.copies[rank] += 1
        if self.copies[rank] != self._fewest + 1:
            return
        del self._least[bisect_left(self._least, rank)]
        if not self._least:
            self._fewest += 1
            self._least = [r for r, kept in enumerate(self.copies) if kept == self._fewest]

    def least_after(self, rank: int) -> Iterator[int]:
        """Those that keep fewest, the next one on the ring first."""
        at = bisect_right(self._least, rank)
        return (self._least[i] for i in chain(range(at, len(self._least)), range(at)))


def _next_buddy(
    members: Sequence[Member],
    rank: int,
    holding: Sequence[int],
    nodes: set[str],
    everywhere: set[str],
    kept: _Kept,
) -> int | None:
    """Who keeps the next copy of a shard that ``holding`` have; None if it would be of no use.

    ``nodes``: those of ``holding``; ``everywhere``: all failure domains that there are.
    """
    domains = {members[h].domain for h in holding} - {""}
    if domains >= everywhere:  # no domain is better than another
        domains = set()
    for peer in kept.least_after(rank):
        if members[peer].node not in nodes and members[peer].domain not in domains:
            return peer  # nobody is better
    ring = chain(range(rank + 1, len(members)), range(rank))
    others = [peer for peer in ring if members[peer].node not in nodes]
    if others:
        return min(others, key=lambda peer: (members[peer].domain in domains, kept.copies[peer]))
    if len(holding) > 1:
        return None
    ring = chain(range(rank + 1, len(members)), range(rank))
    return min(ring, key=lambda peer: kept.copies[peer], default=None)
