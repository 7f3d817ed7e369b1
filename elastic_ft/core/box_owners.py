"""Who of several holders writes or reads a box of a checkpoint for all. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from elastic_ft.core.sharding import (
    Box,
    Holders,
    Placement,
    Sized,
    cut_alike,
    deal_cells,
    largest_first,
    overlapping,
    sized,
)


@dataclass(frozen=True, slots=True)
class Owned:
    """A box that several may have: ``owner``, one of ``holders``, writes or reads it for all."""

    tensor: str
    box: Box
    owner: str
    holders: Holders


def find_owners(
    me: str, placed: Placement, itemsize: Mapping[str, int] | None = None
) -> tuple[Owned, ...]:
    """Of each box that ``me`` has, who writes it: each box once, bytes spread evenly.

    Identical boxes are replicas; other boxes of one tensor are disjoint, which is asserted: every
    layout here cuts that way. What one holder alone has is counted first, then what the same
    holders share goes, largest first, to whoever writes least. Empty boxes are written by no one.
    """
    sizes = itemsize or {}
    loads: dict[str, int] = defaultdict(int)
    owned: list[Owned] = []
    shared: dict[Holders, list[Sized]] = defaultdict(list)
    for tensors in cut_alike(placed):
        replicas = placed[tensors[0]]
        pair = overlapping(replicas)
        assert pair is None, f"{tensors[0]}: {pair[0]} and {pair[1]} overlap, and are no replicas"
        together = sum(sizes.get(tensor, 1) for tensor in tensors)
        for box, holders in replicas.items():
            if len(holders) == 1:
                loads[holders[0]] += box.numel * together
            if me not in holders:
                continue
            if len(holders) == 1:
                owned += [Owned(tensor, box, me, holders) for tensor in tensors]
            else:
                shared[holders] += sized(tensors, box, sizes)
    for holders, cells in shared.items():
        hands = deal_cells(sorted(cells, key=largest_first), [loads[holder] for holder in holders])
        for owner, hand in zip(holders, hands, strict=True):
            owned += [Owned(tensor, box, owner, holders) for _, tensor, box in hand]
    return tuple(sorted(owned, key=attrgetter("tensor", "box")))
