"""How a shard gets from A to B: executes a reshard plan over a generation's host group.

Everyone publishes what it offers (boxes of the chosen source) and what it needs (the boxes of its
new layout), everyone computes the same plan, and each rank receives just what it lacks. Copies
read from snapshots are verified before they leave, messages when they arrive.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from elastic_ft.core.sharding import Box, Copy, Piece, StateMissing, plan_reshard
from elastic_ft.errors import GroupBroken, StateDamaged
from elastic_ft.runtime.buffer import DIGEST_BYTES
from elastic_ft.runtime.engines.base import State, StateTensor
from elastic_ft.runtime.groups import Groups
from elastic_ft.runtime.keeper import LeftShard

MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Boxes:
    """What one participant offers and needs, by tensor name."""

    offers: tuple[tuple[str, Box], ...]
    needs: tuple[tuple[str, Box], ...]
    itemsizes: dict[str, int]


@dataclass(slots=True)
class Transferred:
    bytes_received: int = 0
    needs: list[tuple[tuple[str, Box], ...]] = field(default_factory=list)  # by participant


def exchange_boxes(groups: Groups, offers: Iterable[State], needs: State) -> list[Boxes]:
    """Publishes this participant's boxes. Returns everyone's, in participant order."""
    own = Boxes(
        offers=tuple((name, t.box) for state in offers for name, t in state.items()),
        needs=tuple((name, t.box) for name, t in needs.items()),
        itemsizes={
            name: t.local.element_size() for state in (*offers, needs) for name, t in state.items()
        },
    )
    return [pickle.loads(raw) for raw in groups.exchange("boxes", pickle.dumps(own))]


def move(
    groups: Groups,
    boxes: list[Boxes],
    offers: Iterable[State],
    needs: State,
    left: Sequence[LeftShard] = (),
) -> int:
    """Fills ``needs`` from everyone's ``offers`` and from what keepers have ``left`` of the dead.

    Returns the bytes received. Raises GroupBroken when a peer breaks off, StateDamaged when a
    message arrives damaged, or a keeper's copy is.
    """
    kept = {_left_holder(index): shard for index, shard in enumerate(left)}
    sources = _pieces(b.offers for b in boxes)
    sources += [
        Piece(who, slot.name, slot.box) for who, shard in kept.items() for slot in shard.schema
    ]
    targets = _pieces(b.needs for b in boxes)
    itemsizes: dict[str, int] = {}
    for participant in boxes:
        itemsizes |= participant.itemsizes
    try:
        plan = plan_reshard(sources, targets, itemsizes)
    except StateMissing as error:
        raise GroupBroken(f"the chosen source is not complete: {error}") from error
    held = [(name, tensor) for state in offers for name, tensor in state.items()]
    me = str(groups.participant)
    with torch.no_grad():
        for copy in plan:
            if copy.source == me == copy.target:
                _copy_locally(copy, held, needs)
        received = _fetch(kept, [c for c in plan if c.target == me], needs, itemsizes)
        between = [c for c in plan if c.source not in kept]
        return received + _exchange_messages(groups, between, held, needs, itemsizes)


def _left_holder(index: int) -> str:
    """The name in the plan of a shard that a keeper serves; participants have numbers."""
    return f"left{index}"


def _fetch(
    kept: Mapping[str, LeftShard], plan: list[Copy], needs: State, itemsizes: Mapping[str, int]
) -> int:
    """What comes from keepers, asked for by who needs it. Returns the bytes received."""
    received = 0
    for who, shard in kept.items():
        streams = _messages((c for c in plan if c.source == who), "source", itemsizes)
        for copies in streams.get(who, []):
            data = shard.read((c.tensor, c.box) for c in copies)
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            _unpack(buffer, copies, needs, shard.holder)
            received += len(data)
    return received


def _pieces(boxes: Iterable[tuple[tuple[str, Box], ...]]) -> list[Piece]:
    return [
        Piece(str(participant), name, box)
        for participant, listed in enumerate(boxes)
        for name, box in listed
    ]


def _copy_locally(copy: Copy, held: list[tuple[str, StateTensor]], needs: State) -> None:
    source, target = _find(held, copy), needs[copy.tensor]
    if source.local.data_ptr() == target.local.data_ptr() and source.box == target.box:
        return  # already in place
    _part(target, copy.box).copy_(_part(source, copy.box))


def _find(held: list[tuple[str, StateTensor]], copy: Copy) -> StateTensor:
    for name, tensor in held:
        if name == copy.tensor and tensor.box.intersect(copy.box) == copy.box:
            return tensor
    raise GroupBroken(f"the plan wants {copy.tensor} {copy.box}, which is not held here")


def _part(tensor: StateTensor, box: Box) -> torch.Tensor:
    return tensor.local[box.slices_within(tensor.box)] if box.sizes else tensor.local


def _exchange_messages(
    groups: Groups,
    plan: Iterable[Copy],
    held: list[tuple[str, StateTensor]],
    needs: State,
    itemsizes: Mapping[str, int],
) -> int:
    """One stream of messages per pair of participants, a message of each per round."""
    me = str(groups.participant)
    index: dict[str, list[tuple[str, StateTensor]]] = {}
    for name, tensor in held:
        index.setdefault(name, []).append((name, tensor))
    outgoing = _messages((c for c in plan if c.source == me != c.target), "target", itemsizes)
    incoming = _messages((c for c in plan if c.target == me != c.source), "source", itemsizes)
    rounds = max((len(m) for m in (*outgoing.values(), *incoming.values())), default=0)
    received = 0
    for number in range(rounds):
        arriving: list[tuple[Any, str, torch.Tensor, list[Copy]]] = []
        works = []
        try:
            for peer, messages in sorted(incoming.items()):
                if number < len(messages):
                    size = sum(c.box.numel * itemsizes[c.tensor] for c in messages[number])
                    buffer = torch.empty(size + DIGEST_BYTES, dtype=torch.uint8)
                    work = groups.host.recv([buffer], int(peer), number)
                    arriving.append((work, peer, buffer, messages[number]))
            for peer, messages in sorted(outgoing.items()):
                if number < len(messages):
                    parts = [_part(_find(index[c.tensor], c), c.box) for c in messages[number]]
                    message = _pack(parts)
                    works.append((groups.host.send([message], int(peer), number), message))
        except RuntimeError as error:
            raise GroupBroken(f"transfer: {error}") from error
        for work, peer, buffer, copies in arriving:
            groups.wait(work)
            _unpack(buffer, copies, needs, f"peer {peer}")
            received += buffer.numel()
        for work, _ in works:
            groups.wait(work)
    return received


def _messages(
    copies: Iterable[Copy], peer_of: str, itemsizes: Mapping[str, int]
) -> dict[str, list[list[Copy]]]:
    """Copies by peer, cut into messages of about MESSAGE_BYTES. Equal on both sides."""
    streams: dict[str, list[list[Copy]]] = {}
    sizes: dict[str, int] = {}
    for copy in copies:
        peer = getattr(copy, peer_of)
        nbytes = copy.box.numel * itemsizes[copy.tensor]
        stream = streams.setdefault(peer, [])
        if not stream or sizes[peer] + nbytes > MESSAGE_BYTES:
            stream.append([])
            sizes[peer] = 0
        stream[-1].append(copy)
        sizes[peer] += nbytes
    return streams


def _pack(parts: list[torch.Tensor]) -> torch.Tensor:
    flat = [part.reshape(-1).contiguous().cpu().view(torch.uint8) for part in parts]
    payload = torch.cat(flat)
    digest = bytearray(xxhash.xxh3_128_digest(memoryview(payload.numpy())))
    return torch.cat([payload, torch.frombuffer(digest, dtype=torch.uint8)])


def _unpack(buffer: torch.Tensor, copies: list[Copy], needs: State, peer: str) -> None:
    payload, digest = buffer[:-DIGEST_BYTES], bytes(buffer[-DIGEST_BYTES:].numpy())
    if xxhash.xxh3_128_digest(memoryview(payload.numpy())) != digest:
        raise StateDamaged(f"a message from {peer} arrived damaged", peer)
    offset = 0
    for copy in copies:
        target = _part(needs[copy.tensor], copy.box)
        nbytes = target.numel() * target.element_size()
        # a copy: the dtype's alignment is not given inside a message
        raw = payload[offset : offset + nbytes].clone()
        target.copy_(raw.view(target.dtype).view(target.shape))
        offset += nbytes
