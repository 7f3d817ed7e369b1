"""What a change of layout takes of a device's memory, counted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from elastic_ft import torch_private
from elastic_ft.core.assignment import Tier
from elastic_ft.core.sharding import Box
from elastic_ft.engines import optimizer_state
from elastic_ft.errors import StateDamaged
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.worker import restore
from tests.oneproc.alone import CPU
from tests.oneproc.generations import LAYOUT, Generations, copied, same, small_job, source_of

JOB = small_job(
    parallel={"strategy": "fsdp"},
    precision={"dtype": "bf16"},  # FSDP2 in a world of one too
)


class Device(torch_private.TorchDispatchMode):
    """Counts the bytes of every tensor that is made meanwhile, but for those of host memory."""

    def __init__(self, state: LocalState) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._host = set[int]()  # storages
        self.peak = 0
        self._add([tensor.local for tensor in state.values()])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # they become operations of their parts first
        made = func(*args, **(kwargs or {}))
        self._add([one for one in tree_leaves(made) if isinstance(one, torch.Tensor)])
        return made

    def _add(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.dtype == torch.uint8:  # a buffer of host memory is bytes
                self._host.add(storage._cdata)
            if storage.device == CPU and storage._cdata not in self._host:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Generations]:
    """After a first one of two steps."""
    monkeypatch.setattr(restore, "is_on_gpu", lambda state: True)
    monkeypatch.setattr(optimizer_state, "on_gpu", lambda numbered: True)
    monkeypatch.setattr(optimizer_state, "MATERIALISED_BYTES", 0)  # the model is small
    made = Generations(JOB)
    made.train_two_steps()
    yield made
    made.snapshots.close()


def snapshot_of_the_live_state(generations: Generations) -> None:
    """Held, as it is where the last one was complete when its generation broke."""
    assert generations.live is not None
    holding, state = generations.live
    generations.snapshots.move_out(holding, state)
    (shard,) = generations.snapshots._held
    shard.moved_out = False
    shard.seal()


def nothing(_: Generations) -> None:
    """No snapshot of the live state is held: the newest one is older."""


@pytest.mark.parametrize("before", [nothing, snapshot_of_the_live_state])
def test_the_old_shard_leaves_the_device_before_the_new_one_is_laid_out(
    generations: Generations, before: Callable[[Generations], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generations.live is not None
    before(generations)
    memory, taken = generations.snapshots._memory, list[int]()
    allocated, take = memory.bytes_allocated, memory.take

    def noted(size: int, **options: Any) -> Any:
        taken.append(size)
        return take(size, **options)

    monkeypatch.setattr(memory, "take", noted)
    holding, state = generations.live
    expected, nbytes = copied(state), sum(t.local.nbytes for t in state.values())
    largest = max(t.local.nbytes for t in state.values())
    device = Device(state)
    del state
    with generations.next(source_of(holding, Tier.LIVE)) as groups:
        with device:
            generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)
    assert nbytes <= device.peak <= nbytes + 5 * largest  # of one, its gradient and temporaries
    assert taken == [] if before is snapshot_of_the_live_state else taken[0] >= nbytes
    assert memory.bytes_allocated == allocated  # no snapshot follows: it is freed again


def test_what_breaks_after_that_loses_nothing(
    generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generations.live is not None
    holding, state = generations.live
    expected = copied(state)
    del state

    def breaks(*_: Any) -> None:
        raise RuntimeError("a second loss")

    with (
        generations.next(source_of(holding, Tier.LIVE)) as groups,
        monkeypatch.context() as patched,
        pytest.raises(RuntimeError, match="a second loss"),
    ):
        patched.setattr(restore, "exchange_placed", breaks)
        generations.restored(groups)
    assert generations.live is None
    held = replace(holding, tier=Tier.HOST)
    assert generations.snapshots.holdings() == (held,)
    with generations.next(source_of(held, Tier.HOST)) as groups:
        generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)


def test_a_damaged_snapshot_does_not_stand_in_for_the_live_shard(generations: Generations) -> None:
    snapshot_of_the_live_state(generations)
    generations.snapshots.corrupt(own=True)
    assert generations.live is not None
    holding, state = generations.live
    expected = copied(state)
    with generations.next(source_of(holding, Tier.LIVE)) as groups:
        generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)


def test_on_the_cpu_the_live_shard_is_handed_over_as_it_is(
    generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert generations.live is not None
    holding, state = generations.live
    expected = copied(state)
    with generations.next(source_of(holding, Tier.LIVE)) as groups:
        generations.restored(groups)
        assert same(copied(generations.engine.state()), expected)
    assert generations.snapshots.holdings() == ()


def test_a_snapshot_that_is_damaged_once_the_live_shard_has_left_is_refused(
    generations: Generations,
) -> None:
    """It was offered as the live state that it stood for, unread: damage was trained on (I5)."""
    snapshot_of_the_live_state(generations)
    assert generations.live is not None
    (holding, _) = generations.live

    def damage(point: str, step: int | None = None) -> None:
        if point == "resharding":
            generations.snapshots.corrupt(own=True)

    with generations.next(source_of(holding, Tier.LIVE)) as groups, pytest.raises(StateDamaged):
        generations.restored(groups, damage)


def test_a_state_older_than_the_source_leaves_no_copy(generations: Generations) -> None:
    assert generations.live is not None
    (holding, _) = generations.live
    with generations.next(replace(source_of(holding, Tier.LIVE), step=holding.step + 1)) as groups:
        restore.make_room(
            generations.engine,
            groups,
            generations.snapshots,
            lambda: generations.live,
            generations.forget,
        )
    assert generations.live is None
    assert generations.snapshots.holdings() == ()


def test_buffers_on_the_gpu_alone_move_no_state_that_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An offloaded optimizer's: a mixture's biases, a BatchNorm's statistics. And what torch keeps
    of page-locked memory for other sizes goes."""
    emptied: list[str] = []
    monkeypatch.setattr(torch_private, "empty_host_cache", lambda: emptied.append("host"))
    with torch_private.FakeTensorMode():
        bias = StateTensor((2,), Box.whole((2,)), torch.empty(2, device="cuda"), volatile=True)
    state = {"model.w": StateTensor((2,), Box.whole((2,)), torch.ones(2)), "model.bias": bias}
    engine: Any = SimpleNamespace(
        device=torch.device("cuda"), keeps=lambda layout: False, reference=None
    )
    groups: Any = SimpleNamespace(rank=0, assignment=SimpleNamespace(layout=LAYOUT))

    def fails(*_: Any) -> None:
        raise AssertionError("it is where it is to be")

    snapshots: Any = SimpleNamespace(move_out=fails)
    live: Any = SimpleNamespace(step=3), state
    groups.assignment.source = SimpleNamespace(step=3)
    restore.make_room(engine, groups, snapshots, lambda: live, fails)
    assert emptied == ["host"]
