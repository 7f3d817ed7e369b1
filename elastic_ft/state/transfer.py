"""How a shard gets from A to B: executes a reshard plan over a generation's host group.

Everyone knows what everyone offers (boxes of the chosen source) and needs (the boxes of its new
layout, see ``state.placed``), plans its own part of the moves, and receives just what it lacks.
Copies read from snapshots are verified before they leave, messages when they arrive.

Large parts go from tensor to tensor. Small ones are packed into buffers that are used again: memory
that is written for the first time costs more than a good network does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, permutations, product
from typing import Any, Protocol

import torch

from elastic_ft.core.box_owners import Owned
from elastic_ft.core.sharding import (
    Box,
    Copy,
    Piece,
    ReshardPlan,
    StateMissing,
    place,
    plan_moves,
    slabs,
)
from elastic_ft.errors import GroupBroken, StateDamaged
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import DIGEST_BYTES, Schema, buffer_digest, is_whole, seal
from elastic_ft.state.outcomes import together
from elastic_ft.state.placed import Placed
from elastic_ft.state.residuals import unsaid
from elastic_ft.state.tensors import LocalState, StateTensor, tensor_name

LARGE_BYTES = 256 << 10  # a part of that size is worth a message of its own
LETTER_BYTES = 2 << 20  # of small parts, packed
BATCH_BYTES = 32 << 20  # of large parts that are on their way to one peer; so twice, by batches
FETCH_BYTES = 64 << 20  # of one request to a keeper


Held = dict[str, list[StateTensor]]  # by tensor name


class Left(Protocol):
    """What no living worker has, at whoever serves it: a keeper, a store.

    Attributes:
        holder: who that is, as a source names it.
        is_far: asked after everybody else.
        schema: what it has.
    """

    holder: str
    is_far: bool
    schema: Schema

    def read(self, parts: Iterable[tuple[str, Box]]) -> bytes:
        """The bytes of ``parts``, one after the other, then DIGEST_BYTES of their digest."""


def move(
    groups: Groups,
    placed: Placed,
    offers: Iterable[LocalState],
    needs: LocalState,
    left: Sequence[Left] = (),
    name: str = "fetched",
) -> int:
    """Fills ``needs`` from everyone's ``offers`` and from what keepers have ``left`` of the dead.

    Returns the bytes received. Raises GroupBroken when a peer breaks off, StateDamaged when a
    message arrives damaged, or what was ``left`` is; StateUnreadable when that can't be had.
    Residuals that a checkpoint among ``left`` lacks are 0 for everyone. ``name``: of this move,
    among those of a generation.
    """
    kept = {_left_holder(index): shard for index, shard in enumerate(left)}
    sources = place(
        (Piece(who, s.name, s.box) for who, shard in kept.items() for s in shard.schema),
        placed.offered,
    )
    me = str(groups.participant)
    nothing = unsaid(placed.needed, (shard.schema for shard in left if shard.is_far))
    wanted = {name: who for name, who in placed.needed.items() if name not in nothing}
    try:
        plan = plan_moves(me, sources, wanted, placed.itemsizes, move_costs(groups, kept))
    except StateMissing as error:
        raise GroupBroken(f"the chosen source is not complete: {error}") from error
    received = _execute(groups, plan, placed, offers, needs, kept, name)
    for key, tensor in needs.items():
        if tensor_name(key) in nothing:
            tensor.local.zero_()
    return received


def hand_on(groups: Groups, placed: Placed, owned: Iterable[Owned], needs: LocalState) -> int:
    """Of ``needs``, this participant's boxes are filled: each goes from its owner to all who need
    the same. Returns the bytes received; raises as ``move``.
    """
    me = str(groups.participant)
    sends: list[Copy] = []
    receives: list[Copy] = []
    for one in owned:
        if one.owner == me:
            sends += [Copy(one.tensor, me, who, one.box) for who in one.holders if who != me]
        else:
            receives.append(Copy(one.tensor, one.owner, me, one.box))
    plan = ReshardPlan((), tuple(sends), tuple(receives))
    return _execute(groups, plan, placed, [needs], needs, {})


def _execute(
    groups: Groups,
    plan: ReshardPlan,
    placed: Placed,
    offers: Iterable[LocalState],
    needs: LocalState,
    kept: Mapping[str, Left],
    name: str = "",
) -> int:
    """Returns the bytes received."""
    held, wanted, itemsizes = _by_name(offers), _by_name([needs]), placed.itemsizes
    with torch.no_grad():
        received = 0
        if kept:
            fetch = partial(_fetch, groups, kept, plan.receives, wanted, itemsizes)
            received = together(groups, name, fetch)
        exchange = _Exchange(groups, plan, held, wanted, itemsizes)
        exchange.begin()
        for copy in plan.local:  # while the first batches are on their way
            _copy_locally(copy, held, wanted)
        return received + exchange.end()


def _by_name(offers: Iterable[LocalState]) -> Held:
    held: Held = {}
    for state in offers:
        for key, tensor in state.items():
            held.setdefault(tensor_name(key), []).append(tensor)
    return held


def move_costs(groups: Groups, kept: Mapping[str, Left]) -> dict[tuple[str, str], float]:
    """Of moving from one holder to another: less within a node, most from the store."""
    participants_on: dict[str, list[str]] = {}
    for participant, peer in enumerate(groups.peers):
        participants_on.setdefault(peer.node, []).append(str(participant))
    near = [pair for some in participants_on.values() for pair in permutations(some, 2)]
    everyone = chain.from_iterable(participants_on.values())
    far = product((who for who, shard in kept.items() if shard.is_far), everyone)
    return dict.fromkeys(near, -1.0) | dict.fromkeys(far, 1.0)


def _left_holder(index: int) -> str:
    """The name in the plan of a shard that a keeper serves; participants have numbers."""
    return f"left{index}"


def _fetch(
    groups: Groups,
    kept: Mapping[str, Left],
    plan: Sequence[Copy],
    needs: Held,
    itemsizes: Mapping[str, int],
) -> tuple[int, tuple[str, ...]]:
    """What comes from keepers and from the store, asked for by who needs it.

    Returns the bytes received, and from whom.
    """
    received, holders = 0, dict[str, None]()
    for who, shard in kept.items():
        for copies in _requests((c for c in plan if c.source == who), itemsizes):
            data = shard.read((c.tensor, c.box) for c in copies)
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            _check(is_whole(buffer.numpy()), shard.holder)
            _unpack(buffer, copies, needs)
            received += len(data)
            holders[shard.holder] = None
            if not shard.is_far:  # else it was told as it came
                groups.received(len(data))
    return received, tuple(holders)


def _requests(copies: Iterable[Copy], itemsizes: Mapping[str, int]) -> Iterator[list[Copy]]:
    """Copies by FETCH_BYTES."""
    request: list[Copy] = []
    size = 0
    for copy in copies:
        for part in _cut(copy, FETCH_BYTES, itemsizes):
            nbytes = part.box.numel * itemsizes[part.tensor]
            if request and size + nbytes > FETCH_BYTES:
                yield request
                request, size = [], 0
            request.append(part)
            size += nbytes
    if request:
        yield request


def _cut(copy: Copy, nbytes_max: int, itemsizes: Mapping[str, int]) -> Iterator[Copy]:
    for box in slabs(copy.box, nbytes_max // itemsizes[copy.tensor]):
        yield Copy(copy.tensor, copy.source, copy.target, box)


def _copy_locally(copy: Copy, held: Held, needs: Held) -> None:
    source, target = _find(held, copy), _find(needs, copy)
    if source.local.data_ptr() == target.local.data_ptr() and source.box == target.box:
        return  # already in place
    _part(target, copy.box).copy_(_part(source, copy.box))


def _find(held: Held, copy: Copy) -> StateTensor:
    for tensor in held.get(copy.tensor, ()):
        if tensor.box.contains(copy.box):
            return tensor
    raise GroupBroken(f"the plan wants {copy.tensor} {copy.box}, which is not held here")


def _part(tensor: StateTensor, box: Box) -> torch.Tensor:
    return tensor.local[box.slices_within(tensor.box)] if box.sizes else tensor.local


# ----------------------------------------------------------------------- between participants


@dataclass(slots=True)
class _Batch:
    """What goes to one peer at a time: a message for each large part, and the letter, which has
    the small ones, the digests of the large ones, and its own. ``tag``: of the first message."""

    tag: int
    large: list[Copy] = field(default_factory=list)
    small: list[Copy] = field(default_factory=list)
    large_bytes: int = 0
    small_bytes: int = 0

    @property
    def letter_bytes(self) -> int:
        return self.small_bytes + DIGEST_BYTES * (len(self.large) + 1)


def _batches(
    copies: Iterable[Copy], peer_of: str, itemsizes: Mapping[str, int]
) -> dict[str, list[_Batch]]:
    """Copies by peer. Equal on both sides."""
    streams: dict[str, list[_Batch]] = {}
    for copy in copies:
        stream = streams.setdefault(getattr(copy, peer_of), [_Batch(0)])
        for part in _cut(copy, BATCH_BYTES, itemsizes):
            nbytes, last = part.box.numel * itemsizes[part.tensor], stream[-1]
            is_large = nbytes >= LARGE_BYTES
            if (is_large and last.large_bytes + nbytes > BATCH_BYTES) or (
                not is_large and last.small_bytes + nbytes > LETTER_BYTES
            ):
                last = _Batch(last.tag + 1 + len(last.large))
                stream.append(last)
            (last.large if is_large else last.small).append(part)
            last.large_bytes += nbytes * is_large
            last.small_bytes += nbytes * (not is_large)
    return streams


class _Arena:
    """Buffers of one batch from or to each peer, to be taken again for a later one."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._taken = 0

    def clear(self) -> None:
        self._taken = 0

    def take(self, nbytes: int) -> torch.Tensor:
        if self._taken == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[self._taken].numel() < nbytes:
            self._buffers[self._taken] = torch.empty(nbytes, dtype=torch.uint8)
        self._taken += 1
        return self._buffers[self._taken - 1][:nbytes]


@dataclass(slots=True)
class _Round:
    """A batch from and to each peer, on its way."""

    arena: _Arena
    works: list[Any] = field(default_factory=list)
    arriving: list[tuple[str, _Batch, list[torch.Tensor]]] = field(default_factory=list)


class _Exchange:
    """Two rounds are on their way at any time: one is packed and checked while the other flows."""

    def __init__(
        self,
        groups: Groups,
        plan: ReshardPlan,
        held: Held,
        needs: Held,
        itemsizes: Mapping[str, int],
    ) -> None:
        self._groups, self._held, self._needs = groups, held, needs
        of_peers = (copy for copy in plan.receives if copy.source.isdecimal())  # not of keepers
        self._outgoing = _batches(plan.sends, "target", itemsizes)
        self._incoming = _batches(of_peers, "source", itemsizes)
        streams = (*self._outgoing.values(), *self._incoming.values())
        self._rounds = max(map(len, streams), default=0)
        self._arenas = (_Arena(), _Arena())
        self._running: deque[_Round] = deque()
        self._begun = self._received = 0

    def begin(self) -> None:
        """Starts as much as may be on its way at once."""
        while self._begun < self._rounds and len(self._running) < len(self._arenas):
            self._begin_round(self._begun)
            self._begun += 1

    def end(self) -> int:
        """Waits for all of it. Returns the bytes received."""
        while self._running:
            self._end_round(self._running.popleft())
            self.begin()
        return self._received

    def _begin_round(self, number: int) -> None:
        begun = _Round(self._arenas[number % len(self._arenas)])
        begun.arena.clear()
        try:
            for peer, stream in sorted(self._incoming.items()):
                if number < len(stream):
                    self._receive(begun, peer, stream[number])
            for peer, stream in sorted(self._outgoing.items()):
                if number < len(stream):
                    self._send(begun, peer, stream[number])
        except RuntimeError as error:
            raise GroupBroken(f"transfer: {error}") from error
        self._running.append(begun)

    def _receive(self, begun: _Round, peer: str, batch: _Batch) -> None:
        buffers = []
        for copy in batch.large:
            target = _part(_find(self._needs, copy), copy.box)
            raw = _raw(target)
            nbytes = target.numel() * target.element_size()
            buffers.append(begun.arena.take(nbytes) if raw is None else raw)
        buffers.append(begun.arena.take(batch.letter_bytes))
        host = self._groups.host
        for tag, buffer in enumerate(buffers, batch.tag):
            begun.works.append(host.recv([buffer], int(peer), tag))
        begun.arriving.append((peer, batch, buffers))

    def _send(self, begun: _Round, peer: str, batch: _Batch) -> None:
        letter, host, offset = begun.arena.take(batch.letter_bytes), self._groups.host, 0
        for copy in batch.small:
            offset = _put(letter, offset, _part(_find(self._held, copy), copy.box))
        for tag, copy in enumerate(batch.large, batch.tag):
            part = _part(_find(self._held, copy), copy.box)
            raw = _raw(part)
            if raw is None:
                raw = begun.arena.take(part.numel() * part.element_size())
                _put(raw, 0, part)
            begun.works.append(host.send([raw], int(peer), tag))
            digest = torch.frombuffer(bytearray(buffer_digest(raw.numpy())), dtype=torch.uint8)
            offset = _put(letter, offset, digest)
        seal(letter.numpy())
        begun.works.append(host.send([letter], int(peer), batch.tag + len(batch.large)))

    def _end_round(self, begun: _Round) -> None:
        self._groups.wait(*begun.works)
        for peer, batch, (*large, letter) in begun.arriving:
            _check(is_whole(letter.numpy()), f"peer {peer}")
            _unpack(letter, batch.small, self._needs)
            digests = letter[batch.small_bytes :].numpy().tobytes()
            for number, (copy, buffer) in enumerate(zip(batch.large, large, strict=True)):
                expected = digests[number * DIGEST_BYTES :][:DIGEST_BYTES]
                _check(buffer_digest(buffer.numpy()) == expected, f"peer {peer}")
                if _raw(target := _part(_find(self._needs, copy), copy.box)) is None:
                    target.copy_(buffer.view(target.dtype).view(target.shape))
            nbytes = batch.large_bytes + batch.letter_bytes
            self._received += nbytes
            self._groups.received(nbytes)


def _check(good: bool, sender: str) -> None:
    if not good:
        raise StateDamaged(f"a message from {sender} arrived damaged", sender)


def _raw(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its bytes, uncopied; None if they are not one after the other in host memory."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor.view(-1).view(torch.uint8)
    return None


def _put(buffer: torch.Tensor, offset: int, part: torch.Tensor) -> int:
    """Writes the bytes of ``part`` to ``buffer``. Returns the offset behind them."""
    raw = part.contiguous().view(-1).view(torch.uint8)
    end = offset + raw.numel()
    buffer[offset:end].copy_(raw)
    return end


def _unpack(buffer: torch.Tensor, copies: Iterable[Copy], needs: Held) -> None:
    """Parts that lie one after the other."""
    offset = 0
    for copy in copies:
        target = _part(_find(needs, copy), copy.box)
        nbytes = target.numel() * target.element_size()
        raw = buffer[offset : offset + nbytes]
        if target.is_contiguous():
            target.view(-1).view(torch.uint8).copy_(raw)
        else:  # a copy: the dtype's alignment is not given inside a message
            target.copy_(raw.clone().view(target.dtype).view(target.shape))
        offset += nbytes
