"""``move`` over a network made of a dictionary: every part arrives, damage is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import pytest
import torch

from elastic_ft.core.sharding import Box, Piece, place
from elastic_ft.errors import GroupBroken, StateDamaged
from elastic_ft.state import transfer
from elastic_ft.state.placed import Placed
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.state.transfer import move

# Some parts are large and go by themselves, some are packed; of one a batch takes only a part.
SHAPES = {
    "large": (24, 40),
    "small": (12, 2),
    "vector": (7,),
    "scalar": (),
    "huge": (240, 40),
    "columns": (12, 24),
}
DEADLINE_S = 20.0

Slot = tuple[int, int, int]  # source, target, tag


class Network:
    def __init__(self, damage: Callable[[Slot], bool] = lambda slot: False) -> None:
        self._damage = damage
        self._arrived = threading.Condition()
        self._sent: dict[Slot, bytes] = {}
        self._broken = False

    def break_off(self) -> None:
        with self._arrived:
            self._broken = True
            self._arrived.notify_all()

    def send(self, slot: Slot, data: torch.Tensor) -> None:
        raw = bytearray(data.numpy().tobytes())
        if self._damage(slot):
            raw[0] ^= 1
        with self._arrived:
            assert slot not in self._sent
            self._sent[slot] = bytes(raw)
            self._arrived.notify_all()

    def receive(self, slot: Slot, into: torch.Tensor) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: slot in self._sent or self._broken, DEADLINE_S)
            if slot not in self._sent:
                raise GroupBroken("someone left")
            data = self._sent[slot]
        assert len(data) == into.numel()
        into.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Participant:
    """What ``move`` uses of Groups."""

    def __init__(self, network: Network, number: int) -> None:
        self.participant, self.host, self._network = number, self, network
        self.peers = ()  # nobody is near to anybody
        self.bytes_received = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Callable[[], None]:
        self._network.send((self.participant, peer, tag), tensors[0])
        return lambda: None

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Callable[[], None]:
        return lambda: self._network.receive((peer, self.participant, tag), tensors[0])

    def wait(self, *works: Callable[[], None]) -> None:
        for work in works:
            work()

    def received(self, nbytes: int) -> None:
        self.bytes_received += nbytes


def whole(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    dtype = torch.float64 if name == "vector" else torch.float32
    return (torch.arange(prod(shape), dtype=dtype) + len(name)).view(shape)


def cut(name: str, rank: int, world: int) -> Box:
    """Rows in equal parts, but for ``columns``: those are not one after the other in memory."""
    shape = SHAPES[name]
    if not shape:
        return Box((), ())
    axis = 1 if name == "columns" else 0
    size = -(-shape[axis] // world)
    first = min(rank * size, shape[axis])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[axis], sizes[axis] = first, min(size, shape[axis] - first)
    return Box(tuple(offsets), tuple(sizes))


def shard(rank: int, world: int, filled: bool) -> LocalState:
    state = {}
    for name, shape in SHAPES.items():
        box, full = cut(name, rank, world), whole(name)
        local = full[box.slices_within(Box.whole(shape))] if shape else full
        state[name] = StateTensor(shape, box, local if filled else torch.zeros(box.sizes).to(local))
    return state


def pieces(states: list[LocalState]) -> list[Piece]:
    """Of participants, in their order."""
    return [
        Piece(str(number), name, tensor.box)
        for number, state in enumerate(states)
        for name, tensor in state.items()
    ]


def run(before: int, after: int, network: Network) -> tuple[list[Any], list[LocalState]]:
    """Everyone moves from ``before`` shards to ``after``. Returns results or errors, and states."""
    count = max(before, after)
    offers = [[shard(r, before, True)] if r < before else [] for r in range(count)]
    needs = [shard(r, after, False) if r < after else {} for r in range(count)]
    itemsizes = {name: whole(name).element_size() for name in SHAPES}
    offered = pieces([offer for some in offers for offer in some])
    placed = Placed(place(offered), place(pieces(needs)), itemsizes, {})

    def one(rank: int) -> Any:
        try:
            return move(Participant(network, rank), placed, offers[rank], needs[rank])  # type: ignore[arg-type]
        except (StateDamaged, GroupBroken) as error:
            network.break_off()
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count))), needs


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LARGE_BYTES", 256)
    monkeypatch.setattr(transfer, "LETTER_BYTES", 300)
    monkeypatch.setattr(transfer, "BATCH_BYTES", 1500)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 5), (1, 3), (5, 1), (7, 2)])
def test_every_part_arrives(before: int, after: int) -> None:
    received, needs = run(before, after, Network())
    assert sum(received) > 0
    for rank, state in enumerate(needs[:after]):
        for name, expected in shard(rank, after, True).items():
            assert torch.equal(state[name].local, expected.local), (rank, name)


@pytest.mark.parametrize("tag", range(6))
def test_a_damaged_message_is_noticed(tag: int) -> None:
    results, _ = run(4, 3, Network(lambda slot: slot == (3, 2, tag)))
    assert isinstance(results[2], StateDamaged)
    assert results[2].holder == "peer 3"
    assert all(isinstance(result, int | GroupBroken) for result in results[:2])
