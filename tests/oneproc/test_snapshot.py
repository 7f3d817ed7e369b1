"""Snapshots of one worker: which are held, and which come too late."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ft.core.assignment import Assignment, Holding, Source, Tier
from elastic_ft.core.layouts.layout import LayoutWish, plan_layout
from elastic_ft.core.sharding import Box
from elastic_ft.core.shares import shares
from elastic_ft.errors import GroupBroken
from elastic_ft.keeper.keeper_client import KeeperGone, KeeperRefused
from elastic_ft.state.host_shards import HostShard
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import LocalState, StateTensor
from tests.core.script import member

LAYOUT, _ = plan_layout(LayoutWish(strategy="fsdp"), 2)
MEMBERS = (member("a", "n1"), member("b", "n2"))
SOURCE = Source(59, Tier.INITIAL)
ASSIGNMENT = Assignment(3, MEMBERS, (), LAYOUT, SOURCE, ((), ()), "a test")
SHARE = dict(shares(ASSIGNMENT))["a"]
GROUPS: Any = SimpleNamespace(assignment=SHARE, rank=0, host=None)
DEADLINE_S = 60.0


class Slow:
    """Holds up the copy of a snapshot until it is let go."""

    def __init__(self) -> None:
        self.copying, self.go_on = threading.Event(), threading.Event()

    def __call__(self, point: str, step: int = 0) -> None:
        if point == "snapshot_copy":
            self.copying.set()
            assert self.go_on.wait(DEADLINE_S)


@pytest.fixture
def snapshots() -> Iterator[Snapshots]:
    made = Snapshots("a", False, lambda reason: None)
    yield made
    made.close()


def state_of(step: int) -> LocalState:
    local = torch.full((1024,), float(step))
    return {"w": StateTensor((2048,), Box((0,), (1024,)), local)}


def take(snapshots: Snapshots, step: int, reach: Any, **options: Any) -> HostShard:
    return snapshots.take(step, state_of(step), GROUPS, {}, reach, **options)


def at_once(point: str, step: int = 0) -> None:
    pass


def ended(shard: HostShard) -> bool:
    """Whether it was complete in time; waits until it is decided."""
    return shard.ready.exception(DEADLINE_S) is None


def soon() -> float:
    return time.monotonic() + 0.05


def test_a_snapshot_is_known_by_the_generation_that_computed_its_step(
    snapshots: Snapshots,
) -> None:
    for step, generation in ((59, SOURCE.generation), (60, 3)):
        shard = take(snapshots, step, at_once)
        snapshots.wait(time.monotonic() + DEADLINE_S)
        assert shard.of.generation == generation
    held = snapshots.holdings()
    assert held == tuple(ASSIGNMENT.holding_of(0, step, Tier.HOST) for step in (59, 60))
    source = Source(60, Tier.HOST, LAYOUT.shard_space, generation=3)
    assert snapshots.find(source, LAYOUT.shard_of(0)) is shard
    other = Source(60, Tier.HOST, LAYOUT.shard_space, generation=2)
    assert snapshots.find(other, LAYOUT.shard_of(0)) is None


@pytest.mark.parametrize("partial", [False, True], ids=["to be held", "for an upload"])
def test_a_copy_that_ends_after_its_generation_is_neither_held_nor_uploaded(
    snapshots: Snapshots, partial: bool
) -> None:
    """What it reads may have been overwritten: its digest would be right all the same."""
    slow, told = Slow(), []
    shard = take(snapshots, 60, slow, on_held=None if partial else told.append, partial=partial)
    assert slow.copying.wait(DEADLINE_S)
    assert snapshots.quiesce(soon())
    assert snapshots.holdings() == ()
    snapshots.drop_after(50)
    slow.go_on.set()
    assert not ended(shard)
    with pytest.raises(GroupBroken, match="after its generation had been left"):
        shard.ready.result()
    after = take(snapshots, 51, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert [held.step for held in snapshots.holdings()] == [51] and not told
    snapshots.drop_before(snapshots.newest())
    assert [held.step for held in snapshots.holdings()] == [51]
    assert snapshots.bytes_allocated == after.buffer.memory.numel()  # the late one's is used again


def test_buffers_are_used_again_for_what_lies_in_them_alike_or_otherwise(
    snapshots: Snapshots,
) -> None:
    """How it lies there is worked out once; a rank may have nothing to write."""
    shapes = [(4, 3), (4, 3), (3, 4), (4, 3)]
    for step, shape in enumerate(shapes, 60):
        local = torch.full(shape, float(step))
        state = {"w": StateTensor(shape, Box.whole(shape), local)}
        shard = snapshots.take(step, state, GROUPS, {}, at_once)
        snapshots.wait(time.monotonic() + DEADLINE_S)
        assert shard.is_whole() and torch.equal(shard.state()["w"].local, local)
        snapshots.drop_before(step)
    assert snapshots.bytes_allocated == 2 * shard.buffer.memory.numel()
    empty = snapshots.take(70, {}, GROUPS, {}, at_once, partial=True)
    assert ended(empty)


def test_a_copy_that_ends_in_time_is_held(snapshots: Snapshots) -> None:
    take(snapshots, 60, at_once)
    assert snapshots.quiesce(time.monotonic() + DEADLINE_S)
    assert [held.step for held in snapshots.holdings()] == [60]


def test_copies_that_a_peer_sent_too_late_are_not_held(snapshots: Snapshots) -> None:
    """The exchange, not the copy, outlives the generation: the own snapshot is good, and told."""
    slow = Slow()

    def reach(point: str, step: int = 0) -> None:
        slow("snapshot_copy" if point == "buddy_send" else point + "?", step)

    told: list[int] = []
    take(snapshots, 60, reach, on_held=told.append)
    assert slow.copying.wait(DEADLINE_S)
    assert snapshots.quiesce(soon())
    assert [held.step for held in snapshots.holdings()] == [60]
    slow.go_on.set()
    take(snapshots, 61, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert told == []


def test_a_copy_that_never_ends_is_told_once_a_generation_has_passed(snapshots: Snapshots) -> None:
    slow = Slow()
    take(snapshots, 60, slow)
    assert slow.copying.wait(DEADLINE_S)
    assert snapshots.quiesce(soon())
    assert not snapshots.quiesce(soon())
    slow.go_on.set()
    assert snapshots.quiesce(time.monotonic() + DEADLINE_S)


def test_what_was_kept_of_an_older_cut_has_the_name_it_had(snapshots: Snapshots) -> None:
    live = Holding(60, "pp1.s3.tp1", "pp0.s0.tp0", Tier.LIVE, 2)
    snapshots.keep(live, {})
    (held,) = snapshots.holdings()
    assert (held.generation, held.tier) == (2, Tier.HOST)


# ------------------------------------------------------------------------------- a line that ends


class Line:
    """A keeper that is there until ``ended``."""

    def __init__(self) -> None:
        self.ended, self.told = False, list[Any]()

    def allocate(self, nbytes: int) -> tuple[str, Any]:
        return f"/{nbytes}", mmap.mmap(-1, nbytes)

    def tell(self, message: Any) -> None:
        if self.ended:
            raise KeeperGone("the line has ended")
        self.told.append(message)

    def close(self) -> None:
        self.ended = True


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_keeper_that_hears_nothing_is_not_relied_on(strategy: Any) -> None:
    """Where all have all of the state, a step is held by a keeper, or it is not said to be."""
    layout, _ = plan_layout(LayoutWish(strategy=strategy), 2)
    groups: Any = SimpleNamespace(assignment=replace(SHARE, layout=layout), rank=0, host=None)
    why: list[str] = []
    held: list[int] = []
    snapshots, line = Snapshots("a", False, why.append), Line()
    snapshots.use(line)  # type: ignore[arg-type]

    def snapshot(step: int) -> HostShard:
        shard = snapshots.take(step, state_of(step), groups, {}, at_once, on_held=held.append)
        snapshots.wait(time.monotonic() + DEADLINE_S)
        return shard

    assert snapshot(60).buffer.keeper is line
    assert held == [60] and not why
    line.ended = True
    snapshot(61)
    snapshots.drop_before(61)
    own = snapshot(62)
    assert own.buffer.keeper is None  # never again memory that a keeper serves as another's
    assert set(why) == {"the line has ended"}
    assert len(why) == (3 if strategy == "ddp" else 1)  # in place of a step held, each time
    assert held == ([60] if strategy == "ddp" else [60, 61, 62])
    assert [one.step for one in snapshots.holdings()] == [61, 62]
    other = Line()
    snapshots.use(other)  # type: ignore[arg-type]
    assert snapshot(63).buffer.keeper is other
    assert held[-1] == 63 and len(why) == (3 if strategy == "ddp" else 1)
    snapshots.close()


def test_a_buffer_is_anothers_once() -> None:
    """Who drops a shard and who has uploaded it both give its buffer back."""
    snapshots = Snapshots("a", False, lambda reason: None)
    take(snapshots, 60, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    shard = snapshots.find(
        Source(60, Tier.HOST, LAYOUT.shard_space, generation=3), LAYOUT.shard_of(0)
    )
    assert isinstance(shard, HostShard)
    shard.users += 1
    snapshots.drop_after(50)
    snapshots.release(shard)
    snapshots.discard(shard)
    one = take(snapshots, 61, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    two = take(snapshots, 62, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert one.buffer is not two.buffer
    snapshots.close()


LIVE = ASSIGNMENT.holding_of(0, 60, Tier.LIVE)


def test_a_shard_that_is_not_moved_out_after_all_takes_no_memory(snapshots: Snapshots) -> None:
    """As where the device fails while it is copied."""
    state = state_of(60)
    state["w"] = replace(state["w"], local=torch.ones(7))  # of another size than its box
    with pytest.raises(RuntimeError, match="must match"):
        snapshots.move_out(LIVE, state)
    assert snapshots.bytes_allocated == 0 and snapshots.holdings() == ()


def test_what_was_moved_out_is_freed_where_no_snapshot_follows(snapshots: Snapshots) -> None:
    snapshots.move_out(LIVE, state_of(60))
    assert snapshots.bytes_allocated
    snapshots.drop_moved_out()
    assert snapshots.bytes_allocated == 0 and snapshots.holdings() == ()


def test_a_keeper_without_room_for_what_is_moved_out_has_the_next_snapshot() -> None:
    class Full(Line):
        full = True

        def allocate(self, nbytes: int) -> tuple[str, mmap.mmap]:
            if self.full:
                raise KeeperRefused("no room")
            return super().allocate(nbytes)

    why: list[str] = []
    snapshots, line = Snapshots("a", False, why.append), Full()
    snapshots.use(line)  # type: ignore[arg-type]
    snapshots.move_out(LIVE, state_of(60))
    (moved,) = snapshots._held
    assert isinstance(moved, HostShard) and moved.buffer.keeper is None
    line.full = False
    shard = take(snapshots, 61, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert shard.buffer.keeper is line and not why
    line.full = True
    take(snapshots, 62, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert why == ["no room"]  # of a snapshot it is told, and asked no more
    snapshots.close()


def test_copies_from_host_memory_count_as_cost_though_it_is_page_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an offloaded optimizer's state: the processor that steps makes them."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(time, "thread_time", itertools.count(0.0, 1e6).__next__)
    snapshots = Snapshots("a", True, lambda reason: None)
    take(snapshots, 1, at_once)
    snapshots.wait(time.monotonic() + DEADLINE_S)
    assert snapshots.take_cost_s() >= 1e6
    snapshots.close()
