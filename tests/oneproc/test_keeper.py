"""The node keeper by itself: what it keeps of whom, and what it serves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ft.core.assignment import Assignment, Holding, Keeper, Source, Tier
from elastic_ft.core.commands import DropKept
from elastic_ft.core.events import KeeperHolds
from elastic_ft.core.layouts.layout import LayoutWish, plan_layout
from elastic_ft.core.manifest import ShardEntry
from elastic_ft.core.sharding import Box
from elastic_ft.core.shares import shares
from elastic_ft.errors import StateDamaged
from elastic_ft.keeper.buffer import DIGEST_BYTES, is_whole, label, schema_bytes, seal, shard_bytes
from elastic_ft.keeper.keeper_client import KeeperClient, KeeperRefused, LeftShard
from elastic_ft.keeper.node_keeper import HEALTH_EVERY_S
from elastic_ft.keeper.protocol import Free, Sealed, Unseal, Upload
from elastic_ft.state import host_memory
from elastic_ft.state.host_memory import HostMemory
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import StateTensor
from elastic_ft.storage.store import open_store
from elastic_ft.transport.control import NodeHealth
from tests.core.script import member
from tests.multiproc.harness import make_job
from tests.oneproc.desks import RUN, SCHEMA, SHARD, VALUES, WHOLE, Desk, held, known, of, write


def test_what_a_worker_sealed_outlives_it_and_is_cut_as_asked(desk: Desk, keeper: Keeper) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    write(client, 6)
    path, _ = write(client, 7)
    write(client, 8, sealed=False)
    client.tell(Unseal(path))
    client.close()
    told = desk.next(KeeperHolds)
    assert (told.worker, told.node) == ("w0", "n0")
    assert told.holdings == (held(6),)
    assert told.record == (known(6),)  # it went on to step 7, but of that nothing is left
    left = LeftShard(keeper, desk.server.key, "w0", of(6), SHARD)
    assert left.schema == SCHEMA
    data = left.read([("a", Box((1, 1), (2, 2))), ("b", Box((), ()))])
    assert np.frombuffer(data[:16], np.float32).tolist() == [4, 5, 7, 8]
    assert np.frombuffer(data[16:24], np.int64).tolist() == [6]
    assert len(data) == 24 + DIGEST_BYTES


def test_damage_is_refused_naming_the_keeper(desk: Desk, keeper: Keeper) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    _, memory = write(client, 6)
    memory[5] ^= 1
    client.close()
    desk.next(KeeperHolds)
    with pytest.raises(StateDamaged, match="digest differs") as caught:
        LeftShard(keeper, desk.server.key, "w0", of(6), SHARD)
    assert (caught.value.holder, caught.value.shard) == ("keeper:n0/w0", SHARD)


def test_what_is_not_kept_is_refused(desk: Desk, keeper: Keeper) -> None:
    with pytest.raises(StateDamaged, match="is not kept here"):
        LeftShard(keeper, desk.server.key, "w0", of(6), SHARD)


def test_two_that_ended_at_one_step_are_told_apart(desk: Desk, keeper: Keeper) -> None:
    """The step may have been trained again in between: their states need not agree."""
    for worker, value in (("w0", 1), ("w1", 2)):
        client = KeeperClient(keeper, desk.server.key, worker)
        path, memory = write(client, 6, sealed=False)
        buffer = np.frombuffer(memory, np.uint8)
        buffer[0] = value
        seal(buffer, label(RUN, held(6), SCHEMA))
        client.tell(Sealed(path, held(6), SCHEMA))
        client.close()
        desk.next(KeeperHolds)
    for worker, value in (("w0", 1), ("w1", 2)):
        left = LeftShard(keeper, desk.server.key, worker, of(6), SHARD)
        assert left.read([("a", WHOLE)])[0] == value


def leave(desk: Desk, keeper: Keeper, worker: str, step: int) -> Any:
    """A worker that has a shard of ``step`` ends. Returns the memory that it had mapped."""
    client = KeeperClient(keeper, desk.server.key, worker)
    _, memory = write(client, step)
    client.close()
    desk.next(KeeperHolds)
    return memory


def await_dropped(desk: Desk, keeper: Keeper, step: int) -> None:
    """Of w0. The command and the request come over two connections."""
    for _ in range(1000):
        try:
            LeftShard(keeper, desk.server.key, "w0", of(step), SHARD)
        except StateDamaged:
            return
    pytest.fail(f"step {step}, which w0 left, is still served")


def test_what_is_needed_no_more_is_dropped(desk: Desk, keeper: Keeper) -> None:
    for worker in ("w0", "w1"):
        leave(desk, keeper, worker, 6)
    desk.server.send(keeper.name, DropKept("n0", "w0"))
    await_dropped(desk, keeper, 6)
    assert LeftShard(keeper, desk.server.key, "w1", of(6), SHARD).schema


def test_a_state_of_another_history_is_not_served(desk: Desk, keeper: Keeper) -> None:
    """The worker has step 6 as generation 1 computed it; the job has trained it again since."""
    leave(desk, keeper, "w0", 6)
    with pytest.raises(StateDamaged, match="is not kept here"):
        LeftShard(keeper, desk.server.key, "w0", of(6, generation=2), SHARD)


def test_bytes_of_a_later_step_are_not_served_as_those_of_an_earlier_one(
    desk: Desk, keeper: Keeper
) -> None:
    """The line to the keeper ends; the worker lives, and goes on with the memory it has mapped."""
    memory = leave(desk, keeper, "w0", 40)
    left = LeftShard(keeper, desk.server.key, "w0", of(40), SHARD)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[64:72] = np.array([42], np.int64).view(np.uint8)
    seal(buffer, label(RUN, held(42), SCHEMA))
    with pytest.raises(StateDamaged, match="is being written to"):
        left.read([("b", Box((), ()))])
    with pytest.raises(StateDamaged, match="digest differs"):
        LeftShard(keeper, desk.server.key, "w0", of(40), SHARD)


def test_a_worker_notices_that_its_keeper_does_not_hear_it(desk: Desk, keeper: Keeper) -> None:
    """Its line is shut down, from whichever end: both live."""
    layout, _ = plan_layout(LayoutWish(), 1)
    source = Source(0, Tier.INITIAL)
    alone = Assignment(1, (member("w0", "n0"),), (), layout, source, ((),), "a test", (keeper,))
    groups: Any = SimpleNamespace(assignment=dict(shares(alone))["w0"], rank=0, host=None)
    client, told, why = KeeperClient(keeper, desk.server.key, "w0"), list[int](), list[str]()
    snapshots = Snapshots("w0", False, why.append, RUN)
    snapshots.use(client)
    for step in (6, 7):
        state: Any = {"w": StateTensor((4,), Box((0,), (4,)), torch.full((4,), float(step)))}
        snapshots.take(step, state, groups, {}, lambda *_: None, on_held=told.append)
        snapshots.wait(time.monotonic() + 10)
        client.close()
    assert told == [6] and why  # 7 is in memory of its own
    (left,) = desk.next(KeeperHolds).holdings
    assert left == Holding(6, layout.shard_space, layout.shard_of(0), Tier.KEEPER, 1)
    source = replace(source, step=6, space=left.space, generation=1)
    data = LeftShard(keeper, desk.server.key, "w0", source, left.shard).read(
        [("w", state["w"].box)]
    )
    assert np.frombuffer(data[:16], np.float32).tolist() == [6.0] * 4
    snapshots.close()


@pytest.mark.parametrize(
    "other",
    [
        {"step": 41},
        {"generation": 2},
        {"space": "pp1.s3.tp1"},
        {"shard": "pp0.s1.tp0"},
    ],
)
def test_whole_bytes_are_whole_as_what_they_were_sealed_alone(other: dict[str, Any]) -> None:
    buffer = np.zeros(schema_bytes(SCHEMA) + DIGEST_BYTES, np.uint8)
    seal(buffer, label(RUN, held(40), SCHEMA))
    assert is_whole(buffer, label(RUN, replace(held(40), tier=Tier.PEER), SCHEMA))
    assert not is_whole(buffer, label(RUN, replace(held(40), **other), SCHEMA))
    assert not is_whole(buffer, label("another run", held(40), SCHEMA))
    assert not is_whole(buffer, label(RUN, held(40), SCHEMA[:1]))


def test_a_buffer_that_does_not_fit_is_refused_in_words(desk: Desk, keeper: Keeper) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    with pytest.raises(KeeperRefused, match=r"bytes, .* are free on the node"):
        client.allocate(1 << 50)
    path, _ = write(client, 6)  # and the line is usable
    client.tell(Free(path))
    client.close()
    assert desk.next(KeeperHolds).holdings == ()


def test_it_writes_checkpoints_from_the_workers_memory(
    desk: Desk, keeper: Keeper, tmp_path: Path
) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    path, memory = write(client, 6)
    owned = frozenset({("a", WHOLE)})
    request = Upload(path, held(6), SCHEMA, owned, str(tmp_path), "data/run/g1-s6", 0)
    (entry,) = (ShardEntry.from_dict(values) for values in client.upload(request))
    assert (entry.tensor, entry.box, entry.nbytes) == ("a", WHOLE, 48)
    stored = open_store(str(tmp_path)).get(f"data/run/g1-s6/{entry.file}")
    assert stored == VALUES.tobytes()
    memory[0] ^= 1
    with pytest.raises(KeeperRefused, match="digest differs: it is not written"):
        client.upload(request)
    with pytest.raises(KeeperRefused, match="is no buffer of a worker here"):
        client.upload(
            Upload("/nowhere", held(7), SCHEMA, owned, str(tmp_path), "data/run/g1-s7", 0)
        )
    client.close()


def test_it_beats_often_enough_to_be_missed(desk: Desk, keeper: Keeper) -> None:
    """Where the timeout is shorter than that after which it tells its health."""
    began_s = time.monotonic()
    for _ in range(4):
        assert desk.next(NodeHealth).node == "n0"
    assert make_job("ddp").elastic.heartbeat_timeout_s < HEALTH_EVERY_S
    assert time.monotonic() - began_s < 2 * HEALTH_EVERY_S


def test_page_locked_memory_is_used_again_by_smaller_shards(
    desk: Desk, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world of four, three, four, three: memory is locked for each size that is larger than
    those before. The keeper serves a shard that fills its buffer in part as any other."""
    locked: list[int] = []
    monkeypatch.setattr(host_memory, "pin", lambda memory: locked.append(memory.numel()))
    monkeypatch.setattr(host_memory, "unpin", lambda memory: locked.remove(memory.numel()))
    memory = HostMemory(True, lambda why: pytest.fail(why))
    client = KeeperClient(keeper, desk.server.key, "w0")
    memory.use(client)
    of_four, of_three = 64 * 3, 64 * 4 + 16
    taken: list[int] = []
    for size in (of_four, of_three, of_four, of_three):
        buffer = memory.take(size)
        assert buffer.memory.numel() == size
        taken.append(buffer.capacity.numel())
        memory.give_back([buffer], {size})
    assert taken == [of_four, of_three, of_three, of_three] and locked == [of_three]
    assert memory.bytes_allocated == of_three

    buffer = memory.take(shard_bytes(SCHEMA))
    assert buffer.capacity.numel() == of_three > buffer.memory.numel()
    buffer.bytes[:48] = VALUES.view(np.uint8)
    said: list[Any] = []
    tell = client.tell
    monkeypatch.setattr(client, "tell", lambda message: said.append(message) or tell(message))
    for step in (5, 6):
        seal(buffer.bytes, label(RUN, held(step), SCHEMA))
        assert memory.tell_sealed(buffer, held(step), tuple(SCHEMA))
    assert [message.schema for message in said] == [SCHEMA, None]  # of thousands of tensors: once
    memory.close()
    told = desk.next(KeeperHolds)
    assert told.holdings == (held(6),)
    left = LeftShard(keeper, desk.server.key, "w0", of(6), SHARD)
    assert left.schema == SCHEMA
    data = left.read([("a", Box((1, 1), (2, 2)))])
    assert np.frombuffer(data[:16], np.float32).tolist() == [4, 5, 7, 8]


def test_memory_that_cant_be_page_locked_is_used_all_the_same(
    desk: Desk,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a GPU torch locks none of its own either."""

    def refuse(memory: torch.Tensor) -> None:
        raise RuntimeError("cudaHostRegister: error 2")

    unlocked: list[torch.Tensor] = []
    monkeypatch.setattr(host_memory, "pin", refuse)
    monkeypatch.setattr(host_memory, "unpin", unlocked.append)
    memory = HostMemory(True, lambda why: None)
    own = memory.take(64)
    memory.use(KeeperClient(keeper, desk.server.key, "w0"))
    kept = memory.take(64)
    assert (own.keeper, kept.keeper is None) == (None, False)
    memory.let_go([own, kept])
    assert unlocked == [], "what is not locked is not unlocked: CUDA would call it an error"
    (told,) = caplog.messages
    assert told.startswith("snapshots can't be page-locked")
    memory.close()
