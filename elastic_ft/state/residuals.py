"""What gradients still owe, each replica a part of its own, as a generation begins: the sum.

Elsewhere replicas of a shard hold equal state, and any of them will do. Residuals are the exception
(docs/adr/0009-residuals-are-summed.md): before state moves, those who hold one shard of the source
sum theirs, so that any of them will do. What replicas had that are gone is lost, and is said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastic_ft.core.assignment import Tier
from elastic_ft.groups.groups import OTHERS_TIMEOUT_S, Groups
from elastic_ft.keeper.buffer import Schema
from elastic_ft.state.tensors import LocalState

PREFIX = "comm."
PARTS = "comm.parts"  # into how many parts a residual is divided; 1: it is the sum
OWN = (Tier.LIVE, Tier.HOST)  # what a rank has of its own shard
PIECE = 8 << 20  # numbers that are summed at a time: a deadline follows what has come
TAG = 1 << 24  # of the first message: who shares a shard with another shares no other with it


def residual_of(parameter: str) -> str:
    """The state's key for what the gradient of ``parameter`` owes."""
    return f"{PREFIX}{parameter}.residual"


def is_optional(name: str) -> bool:
    """Whether a checkpoint may lack the tensor, or have it for nothing."""
    return name.startswith(PREFIX)


def unsaid(needed: Iterable[str], stored: Iterable[Schema]) -> frozenset[str]:
    """Those of ``needed`` that a checkpoint may lack and one of ``stored`` does: of its step,
    nobody owes anything there."""
    said = [{slot.name for slot in schema} for schema in stored]
    return frozenset(
        name for name in needed if is_optional(name) and any(name not in names for names in said)
    )


@dataclass(frozen=True, slots=True)
class _Has:
    """Of one participant: of which shards it has a residual, and in how many parts.

    Attributes:
        parts: its own.
        copies: of a peer's.
    """

    parts: tuple[tuple[str, int], ...]
    copies: tuple[tuple[str, int], ...]


def summed_residuals(groups: Groups, offers: Sequence[LocalState]) -> tuple[list[LocalState], str]:
    """``offers``, as of ``restore``, with residuals that are the sum; all participants call it.

    Also returns what was lost, in words. What is offered is not written to: where this breaks off,
    the state of before is as it was. Raises GroupBroken.
    """
    tiers = sorted(groups.assignment.has.items())
    known = [(shard, tier, at) for at, (shard, tier) in enumerate(tiers) if PARTS in offers[at]]
    own = {shard: at for shard, tier, at in known if tier in OWN}
    copies = {shard: at for shard, _, at in known if shard not in own}
    holders: dict[str, list[tuple[int, int]]] = {}
    only: dict[str, int] = {}
    told = _Has(_parts(own, offers), _parts(copies, offers))
    for who, has in enumerate(groups.exchange_values("residuals", told, OTHERS_TIMEOUT_S)):
        for shard, parts in has.parts:
            holders.setdefault(shard, []).append((who, parts))
        for shard, parts in has.copies:
            only[shard] = max(parts, only.get(shard, 1))
    found, lost = list(offers), []
    for shard, having in sorted(holders.items()):
        parts = min(parts for _, parts in having)
        if parts > len(having):
            lost.append(f"{parts - len(having)} of {parts} parts for {shard}")
        if shard in own and any(number != 1 for _, number in having):
            found[own[shard]] = _with_sum(groups, offers[own[shard]], having)
    for shard, parts in sorted(only.items()):
        if shard not in holders and parts > 1:
            lost.append(f"{parts - 1} of {parts} parts for {shard}")
    for number, (shard, _) in enumerate(tiers):
        if shard in holders and shard not in own:  # a peer's copy: its owner's part, or nobody's
            found[number] = {k: t for k, t in offers[number].items() if not is_optional(k)}
    return found, ", ".join(lost)


def settle_residuals(state: LocalState, lost: str) -> str:
    """Once ``state`` is filled. Returns what was lost, in words, if that is not known to be
    ``lost``: of what no living rank had, what one replica left with a keeper may have been all."""
    if PARTS not in state:
        return lost
    parts = int(state[PARTS].local)
    state[PARTS].local.fill_(1)
    return lost or (f"{parts - 1} of {parts} parts" if parts > 1 else "")


def _parts(at: Mapping[str, int], offers: Sequence[LocalState]) -> tuple[tuple[str, int], ...]:
    return tuple((shard, int(offers[number][PARTS].local)) for shard, number in at.items())


def _with_sum(groups: Groups, offer: LocalState, having: Sequence[tuple[int, int]]) -> LocalState:
    """``having``: who has the shard, by number, and in how many parts."""
    keys = sorted(key for key in offer if is_optional(key) and key != PARTS)
    flat = torch.cat([torch.empty(0), *(offer[key].local.flatten().cpu() for key in keys)])
    whole = [who for who, parts in having if parts == 1]
    others = [who for who, parts in having if parts != 1]
    total = []
    for number, piece in enumerate(flat.split(PIECE)):
        if whole:
            piece = _given(groups, piece, whole[0], others, TAG + number)
        elif len(others) > 1 and piece.numel():
            piece = _added(groups, piece, others, TAG + 2 * number)
        total.append(piece)
    flat = torch.cat(total)
    parts = flat.split([offer[key].local.numel() for key in keys])
    changed = {
        key: replace(offer[key], local=part.view_as(offer[key].local).to(offer[key].local.dtype))
        for key, part in zip(keys, parts, strict=True)
    }
    one = replace(offer[PARTS], local=torch.ones_like(offer[PARTS].local))
    return {**offer, **changed, PARTS: one}


def _given(groups: Groups, flat: Tensor, giver: int, others: Sequence[int], tag: int) -> Tensor:
    """Who has the sum gives it to ``others``."""
    me, host = groups.participant, groups.host
    if me == giver and flat.numel():
        groups.wait(*(host.send([flat], who, tag) for who in others))
    elif me in others and flat.numel():
        flat = torch.empty_like(flat)
        groups.wait(host.recv([flat], giver, tag))
        groups.received(flat.nbytes)
    return flat


def _added(groups: Groups, flat: Tensor, having: Sequence[int], tag: int) -> Tensor:
    """Each of ``having`` adds up one part for all, in their order."""
    me, host = groups.participant, groups.host
    mine, chunks = having.index(me), flat.tensor_split(len(having))
    others = [(number, who) for number, who in enumerate(having) if who != me]
    theirs = {number: torch.empty_like(chunks[mine]) for number, _ in others}
    works = [host.recv([theirs[n]], who, tag) for n, who in others if chunks[mine].numel()]
    works += [host.send([chunks[n]], who, tag) for n, who in others if chunks[n].numel()]
    groups.wait(*works)
    total = torch.empty_like(flat)
    totals = total.tensor_split(len(having))
    totals[mine].zero_()
    for number in range(len(having)):
        totals[mine].add_(chunks[mine] if number == mine else theirs[number])
    works = [host.recv([totals[n]], who, tag + 1) for n, who in others if totals[n].numel()]
    works += [host.send([totals[mine]], who, tag + 1) for _, who in others if totals[mine].numel()]
    groups.wait(*works)
    groups.received(2 * total.nbytes)
    return total
