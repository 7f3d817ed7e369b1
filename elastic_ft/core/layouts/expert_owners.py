"""Which rank has which experts, where ranks share them out: as few move as can be. Pure.

``Layout.owners`` says it, of layers with so many experts; of others, and where it is empty, ranks
have runs of them. Parts of the state are named by experts, not by where these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from math import inf, lcm

from elastic_ft.core.layouts.layout import Layout, ShardPlace

HadBy = tuple[int, ShardPlace, bool]  # a rank, where it was before, and whether not as a copy
Way = tuple[int, int, int]  # a rank, an expert that leaves it, and to which
SEARCHED_MAX = 16 * 16 * 512  # ranks, ranks, experts: some 0.1 s, in which training is paused


def owners_of(layout: Layout, experts: int) -> tuple[int, ...]:
    """Of each of a layer's ``experts``, which of ``layout.ep`` has it."""
    return layout.owners if len(layout.owners) == experts else in_runs(experts, layout.ep)


def in_runs(experts: int, ranks: int) -> tuple[int, ...]:
    """In order, as DTensor cuts them: the last ranks may have fewer, or none."""
    most = -(-experts // ranks)
    return tuple(expert // most for expert in range(experts))


def with_owners(layout: Layout, owners: tuple[int, ...]) -> Layout:
    """``layout`` with these, which it need not say of runs."""
    in_order = owners == in_runs(len(owners), layout.ep)
    return replace(layout, owners=() if in_order else owners)


def experts_at(layout: Layout, experts: int, rank: int) -> tuple[int, ...]:
    """Of a layer's ``experts`` those that ``rank`` of ``layout.ep`` has, in order."""
    return _experts_of_all(layout, experts)[rank]


@lru_cache(maxsize=64)  # each box of each rank is asked for
def _experts_of_all(layout: Layout, experts: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(layout.ep)]
    for expert, owner in enumerate(owners_of(layout, experts)):
        found[owner].append(expert)
    return tuple(map(tuple, found))


def experts_at_most(layout: Layout, experts: int) -> int:
    """Of a layer's ``experts``, how many the fullest rank has."""
    return -(-experts // layout.ep)


def expert_share(layout: Layout, experts: int) -> float:
    """The same as a part of them; of a model without experts 1."""
    return experts_at_most(layout, experts) / experts if experts else 1.0


def expert_place(layout: Layout, place: ShardPlace) -> tuple[int, int]:
    """Which part of its experts a rank at ``place`` has, and which of the ranks that share them out
    it is."""
    return divmod(place.dp_shard, layout.ep)


def part_of(experts: Sequence[int], index: int, parts: int) -> Sequence[int]:
    """As FSDP2 cuts what a rank has along its first axis."""
    most = -(-len(experts) // parts)
    return experts[index * most : (index + 1) * most]


def runs_of(experts: Iterable[int]) -> list[tuple[int, int]]:
    """The first of each run, and how many they are."""
    runs = [
        [expert for _, expert in run]
        for _, run in groupby(enumerate(experts), lambda at: at[1] - at[0])
    ]
    return [(run[0], len(run)) for run in runs]


# ------------------------------------------------------------------------------ who gets which


def weigh(experts: int, layout: Layout, former: Layout, held: Iterable[HadBy]) -> list[list[int]]:
    """How much the ranks that would share an expert have of it: [``layout.ep``, ``experts``].

    ``held``: parts of the state as ``former`` cuts it. More of it counts first; of equally much,
    what is in place counts for more than copies.
    """
    shards, old_shards = layout.expert_shards, _parts(former)[1]
    grid = lcm(shards, old_shards)
    more, old_more = grid // shards, grid // old_shards
    much = 1 + experts * grid * layout.world_size  # over all that could be in place
    had: dict[int, Sequence[int]] = {}
    found = [[0] * experts for _ in range(layout.ep)]
    for rank, place, is_live in held:
        shard, group = expert_place(layout, layout.place_of(rank))
        old_shard, old_group = divmod(place.dp_shard, _parts(former)[0])
        first = max(shard * more, old_shard * old_more)
        last = min((shard + 1) * more, (old_shard + 1) * old_more)
        if first < last:
            if old_group not in had:
                had[old_group] = _former_experts(former, experts, old_group)
            for expert in had[old_group]:
                found[group][expert] += (last - first) * (much + is_live)
    return found


def _parts(former: Layout) -> tuple[int, int]:
    """Among how many ranks experts were, and into how many parts each was cut."""
    if former.shares_experts:
        return former.ep, former.expert_shards
    return former.state_shards, 1  # by FSDP2, which cuts along the first axis


def _former_experts(former: Layout, experts: int, group: int) -> Sequence[int]:
    if former.shares_experts:
        return experts_at(former, experts, group)
    return part_of(range(experts), group, former.state_shards)


def allot(weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Who is to have each expert, so that the most stays: the sum of ``weights`` is the greatest.

    ``weights``: by rank and expert. No rank has two more than another. Of equal ways, that in which
    the first ranks have the first experts.

    Experts are placed one by one, each along the best path: it takes the place of another, which
    takes that of a third, until there is room (successive best augmentations: Ahuja, Magnanti and
    Orlin, Network Flows, 1993, section 9.7). Where a rank that has the most of it has room, that is
    the best. For many experts of many ranks that takes too long (``SEARCHED_MAX``): each takes the
    best of the ranks that have room.
    """
    dealt = _Dealt(weights)
    experts = range(len(weights[0]))
    for expert in sorted(experts, key=lambda x: (-max(of[x] for of in weights), x)):
        dealt.place(expert)
    owners = [0] * len(experts)
    for rank, has in enumerate(dealt.has):
        for expert in has:
            owners[expert] = rank
    return tuple(owners)


class _Dealt:
    """Attributes:
    has: by rank, its experts.
    """

    def __init__(self, weights: Sequence[Sequence[int]]) -> None:
        self._weights = weights
        self.has: list[list[int]] = [[] for _ in weights]
        self._least, self._extras = divmod(len(weights[0]), len(weights))

    def place(self, expert: int) -> None:
        most = max(of[expert] for of in self._weights)
        for rank, of in enumerate(self._weights):
            if of[expert] == most and self._has_room(rank):
                self.has[rank].append(expert)
                return
        if len(self._weights) ** 2 * len(self._weights[0]) > SEARCHED_MAX:
            room = [rank for rank in range(len(self.has)) if self._has_room(rank)]
            self.has[max(room, key=lambda r: (self._weights[r][expert], -r))].append(expert)
            return
        gains, ways = self._search()
        totals = [of[expert] + gain for of, gain in zip(self._weights, gains, strict=True)]
        ranks = range(len(self.has))
        rank = max(ranks, key=lambda r: (totals[r], ways[r] is None, -r))
        self.has[rank].append(expert)
        while (way := ways[rank]) is not None:
            giving, leaving, rank = way
            self.has[giving].remove(leaving)
            self.has[rank].append(leaving)

    def _has_room(self, rank: int) -> bool:
        own = len(self.has[rank])
        return own < self._least or (own == self._least and self._is_extra_left())

    def _is_extra_left(self) -> bool:
        return sum(len(has) > self._least for has in self.has) < self._extras

    def _search(self) -> tuple[list[float], list[Way | None]]:
        """What it changes if a rank takes one more, and how there is room for it: it gives one
        away, or another one does, which has more than the least (Bellman and Ford)."""
        ranks = range(len(self.has))
        gains = [0.0 if self._has_room(rank) else -inf for rank in ranks]
        ways: list[Way | None] = [None for _ in ranks]
        best = {(rank, to): self._best(rank, to) for rank in ranks for to in ranks if rank != to}
        for _ in ranks:
            giving: list[tuple[float, Way]] = []
            for rank in ranks:
                found = [(best[rank, to], to) for to in ranks if to != rank]
                giving.append(
                    max((gain + gains[to], (rank, expert, to)) for (gain, expert), to in found)
                )
            fuller = [giving[rank] for rank in ranks if len(self.has[rank]) > self._least]
            before = list(gains)
            for rank in ranks:
                others = fuller if len(self.has[rank]) <= self._least else []
                gain, way = max([giving[rank], *others])
                if gain > gains[rank]:
                    gains[rank], ways[rank] = gain, way
            if gains == before:
                break
        return gains, ways

    def _best(self, rank: int, to: int) -> tuple[float, int]:
        """Which expert ``rank`` gives away best to another, and what that changes."""
        if not self.has[rank]:
            return -inf, 0
        mine, theirs = self._weights[rank], self._weights[to]
        expert = max(self.has[rank], key=lambda x: (theirs[x] - mine[x], x))
        return theirs[expert] - mine[expert], expert
