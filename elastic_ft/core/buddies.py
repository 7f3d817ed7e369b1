"""Who keeps a second copy of whose shard. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from elastic_ft.core.assignment import Member
from elastic_ft.core.layouts.layout import Layout


def choose_buddies(
    members: Sequence[Member], layout: Layout, copies: int
) -> tuple[tuple[int, ...], ...]:
    """Returns, per rank, the ranks that keep a copy of its shard, so that ``copies`` nodes have it.

    Replicas on several nodes count as copies, and a state that every member holds whole needs
    none: a copy of it survives no more. Copies go to nodes that have none yet, first to other
    failure domains, each worker keeping as few as can be. Where there are too few nodes, one copy
    goes to another worker all the same: it survives a process.
    """
    if copies < 2 or len(members) < 2 or not layout.is_cut:
        return ((),) * len(members)
    kept, where = _Kept(len(members)), [member.node for member in members]
    domains = _failing_together(members)
    everywhere = set(domains)
    are_parted, is_alone = len(everywhere - {""}) > 1, len(layout.replicas_of(0)) == 1
    nodes_of: dict[int, set[str]] = {}  # by the first of several ranks that have the shard
    buddies: list[tuple[int, ...]] = []
    for rank in range(len(members)):
        replicas = range(rank, rank + 1) if is_alone else layout.replicas_of(rank)
        if is_alone:  # nothing is kept of it: what lives on costs collections of garbage
            nodes = {where[rank]}
        elif rank == replicas.start:
            nodes = nodes_of[rank] = {where[r] for r in replicas}
        else:
            nodes = nodes_of[replicas.start]
        chosen: list[int] = []
        while len(nodes) < copies:
            avoid: set[str] = set()
            if are_parted:
                avoid = {domains[h] for h in (*replicas, *chosen)} - {""}
                avoid = avoid if avoid < everywhere else set()  # none is better than another
            buddy = _next_buddy(rank, where, nodes, domains, avoid, kept)
            if buddy is None and len(replicas) + len(chosen) == 1:
                buddy = min(_ring(rank, len(members)), key=lambda peer: kept.copies[peer])
            if buddy is None:
                break
            chosen.append(buddy)
            kept.add(buddy)
            nodes = nodes | {where[buddy]}
        buddies.append(tuple(chosen))
    return tuple(buddies)


def _failing_together(members: Sequence[Member]) -> list[str]:
    """Of each, its failure domain: of nested ones the outermost of which there are several. Where
    a node has no label, none is known."""
    named = [member.domain for member in members]
    paths = {domain: domain.split("/") for domain in set(named)}
    for depth in range(1, max(map(len, paths.values())) + 1):
        at_depth = [path[:depth] for path in paths.values() if len(path) >= depth]
        if len({tuple(path) for path in at_depth if path[-1]}) > 1:
            break
    cut = {domain: "/".join(path[:depth]) for domain, path in paths.items()}
    return [cut[domain] for domain in named]


class _Kept:
    """How many copies each rank keeps by now, and the ranks that keep fewest, in order."""

    def __init__(self, count: int) -> None:
        self.copies, self._fewest = [0] * count, 0
        self._find_least()

    def _find_least(self) -> None:
        """``_next[rank]``: where to look for the first one from ``rank`` on; itself, if it is."""
        count, least = len(self.copies), 0
        self._next = list(range(count + 1))
        for rank, copies in enumerate(self.copies):
            if copies == self._fewest:
                least += 1
            else:
                self._next[rank] = rank + 1
        self._left = least

    def add(self, rank: int) -> None:
        self.copies[rank] += 1
        if self.copies[rank] != self._fewest + 1:
            return
        self._next[rank] = rank + 1
        self._left -= 1
        if not self._left:
            self._fewest += 1
            self._find_least()

    def _from(self, rank: int) -> int:
        """The first that keeps fewest from ``rank`` on, or how many ranks there are. The way there
        is halved for the next who asks: it is O(log n) each, and near O(1) for all of them."""
        ahead = self._next
        while ahead[rank] != rank:
            ahead[rank] = rank = ahead[ahead[rank]]
        return rank

    def least_after(self, rank: int) -> Iterator[int]:
        """Those that keep fewest, the next one on the ring first."""
        count = len(self.copies)
        peer = self._from(rank + 1)
        while peer < count:
            yield peer
            peer = self._from(peer + 1)
        peer = self._from(0)
        while peer <= rank:
            yield peer
            peer = self._from(peer + 1)


def _next_buddy(
    rank: int,
    where: Sequence[str],
    nodes: set[str],
    domains: Sequence[str],
    avoid: set[str],
    kept: _Kept,
) -> int | None:
    """Who keeps the next copy of a shard; None if there is no other node for it.

    ``where``, ``domains``: of each rank. ``nodes``, ``avoid``: those that have the shard.
    """
    for peer in kept.least_after(rank):
        if where[peer] not in nodes and domains[peer] not in avoid:
            return peer  # nobody is better
    others = [peer for peer in _ring(rank, len(where)) if where[peer] not in nodes]
    return min(others, key=lambda p: (domains[p] in avoid, kept.copies[p]), default=None)


def _ring(rank: int, count: int) -> Iterator[int]:
    """The others, the next one first."""
    return chain(range(rank + 1, count), range(rank))
