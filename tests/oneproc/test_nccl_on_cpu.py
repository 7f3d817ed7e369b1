"""How groups over NCCL are broken off, on the ``fake`` backend: eight ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_ft import torch_private
from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.errors import GroupBroken
from elastic_ft.groups import groups as groups_module
from elastic_ft.groups.groups import Groups
from elastic_ft.worker import devices
from tests.oneproc.gpu_jobs import make_groups, make_job

SOON_S = 20.0
LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("fsdp", {}),
    ("hsdp", {"shard_size": 4}),
    ("fsdp", {"tp": 2}),
    ("fsdp", {"tp": 2, "pp": 2}),
]


class Backend:
    """Stands in for NCCL's, of one group."""

    def __init__(self, name: str, abort: Callable[[str], None]) -> None:
        self.name, self._abort = name, abort

    def abort(self) -> None:
        self._abort(self.name)


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Groups]]:
    """Makes rank 0's groups of a layout, as if over NCCL."""

    def make(abort: Callable[[str], None], strategy: str, **sizes: int) -> Groups:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        groups = make_groups(strategy, 8, **sizes)
        groups.mesh = groups_module.make_mesh(groups.assignment.layout, torch.device("cpu"))
        groups.uses_nccl = True
        backends = {g.group_name: Backend(g.group_name, abort) for g in c10d._world.pg_map}
        real = dist.ProcessGroup._get_backend
        monkeypatch.setattr(
            dist.ProcessGroup,
            "_get_backend",
            lambda group, device: (
                backends[group.group_name]
                if torch.device(device).type == "cuda"
                else real(group, device)
            ),
        )
        return groups

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_private.forget_meshes()


def names() -> list[str]:
    """Of all groups there are, newest first."""
    return [group.group_name for group in reversed(c10d._world.pg_map)]


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_abort_reaches_every_communicator_of_the_mesh_once(
    form: Callable[..., Groups], strategy: str, sizes: dict[str, int]
) -> None:
    aborted: list[str] = []
    groups = form(aborted.append, strategy, **sizes)
    everyone = names()
    groups.abort("a peer died")
    groups.abort("retreat")
    groups.teardown()
    assert sorted(aborted) == sorted(everyone)
    assert not dist.is_initialized()


def test_no_communicator_waits_for_another_to_be_aborted(form: Callable[..., Groups]) -> None:
    """Each may wait for a kernel of the other to end (pytorch#119797), and nobody who aborts may
    wait at all: the watchdog has more to do."""
    together, ended = threading.Barrier(4), []

    def abort(name: str) -> None:
        together.wait(SOON_S)  # broken, unless all of them come
        ended.append(name)

    groups = form(abort, "fsdp", tp=2, pp=2)
    everyone = names()
    groups.abort("a peer died")
    assert len(everyone) == together.parties
    groups.teardown()
    assert sorted(ended) == sorted(everyone)


class Never:
    """What waits for a peer that has died, with torch's locks held."""

    def __init__(self) -> None:
        self.reached, self.ends = threading.Event(), threading.Event()

    def __call__(self, *_: Any, **__: Any) -> None:
        self.reached.set()
        self.ends.wait()

    def broken_off(self, groups: Groups, make: Callable[[], object]) -> list[str]:
        """Why who makes some of ``groups`` has not, once they are aborted."""
        broken: list[str] = []

        def run() -> None:
            with torch_private.groups_made_by(groups._connected):
                try:
                    make()
                except GroupBroken as error:
                    broken.append(str(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert self.reached.wait(SOON_S)
        groups.abort("a peer died")
        thread.join(SOON_S)
        return broken


@pytest.fixture
def never() -> Iterator[Never]:
    waiting = Never()
    yield waiting
    waiting.ends.set()


BACKEND = torch._C._distributed_c10d.Backend


def test_who_waits_for_a_worlds_communicator_is_woken(
    form: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch, never: Never
) -> None:
    """All its ranks make it together: where one has died, the others wait in C++, whatever is
    aborted."""
    monkeypatch.setattr(BACKEND, "eager_connect_single_device", never)
    groups = form(lambda name: None, "fsdp")
    device = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(device)
    why = never.broken_off(groups, lambda: backend.eager_connect_single_device(device))
    assert why == ["a peer died"]
    assert BACKEND.eager_connect_single_device is never  # as it was


def test_who_waits_for_a_group_split_from_the_world_is_woken(
    monkeypatch: pytest.MonkeyPatch, never: Never
) -> None:
    """As for the world's."""
    monkeypatch.setattr(dist.ProcessGroup, "split_group", never)
    groups, world = make_groups("fsdp", 2), dist.ProcessGroup(dist.HashStore(), 0, 2)
    assert never.broken_off(groups, lambda: world.split_group([0])) == ["a peer died"]


def test_groups_of_which_another_is_being_made_are_left(
    form: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch, never: Never
) -> None:
    """torch holds the locks of what is split: who aborted and ended it waited for a minute, and was
    killed for not coming to its safe point."""
    groups = form(lambda name: never.ends.wait() and None, "hsdp", shard_size=4)
    monkeypatch.setattr(dist.ProcessGroup, "split_group", never)
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", lambda _: never.ends.wait())
    world = dist.group.WORLD
    never.broken_off(groups, lambda: world.split_group([0]))
    thread = threading.Thread(target=groups.teardown, daemon=True)
    thread.start()
    thread.join(SOON_S / 4)
    assert not thread.is_alive() and not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not world and names() == ["0"]
    monkeypatch.undo()


def test_who_shares_positions_is_split_from_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mesh dimensions are: ``new_group`` waits for all ranks with the interpreter's lock held,
    once for each group, and nobody could break that off."""
    made: list[Any] = []

    def keep(**given: Any) -> Any:
        made.append(given["split_ranks"])
        return "split"

    layout = make_groups("fsdp", 4, cp=2).assignment.layout
    monkeypatch.setattr(dist, "split_group", keep)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: pytest.fail("it is not split"))
    found: Any = groups_module._make_context(layout, split=True)
    assert found == "split" and made == [[[0, 1], [2, 3]]]


def test_a_communicator_that_can_not_be_aborted_is_named(
    form: Callable[..., Groups], caplog: pytest.LogCaptureFixture
) -> None:
    def abort(name: str) -> None:
        raise RuntimeError("timed out")

    groups = form(abort, "fsdp")
    groups.teardown()
    assert "aborting a communicator: RuntimeError: timed out" in caplog.text


def test_who_enqueues_as_communicators_are_aborted_waits_for_nothing() -> None:
    """Of one that does not block torch asks how far it is, again and again, also once it is
    aborted: for longer than a survivor may take to its safe point."""
    assert WORKER_ENVIRONMENT["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0"
    assert WORKER_ENVIRONMENT["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(("users", "found"), [(None, "0"), ("1", "1")])
def test_memory_that_gpus_have_together_is_not_used_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, users: str | None, found: str
) -> None:
    """NVLink SHARP's: with a peer lost, what is left of it can't be given back."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "")
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    if users is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", users)
    devices.set_nccls_defaults()
    assert devices.os.environ["NCCL_NVLS_ENABLE"] == found


def test_torchs_watchdog_neither_ends_a_worker_nor_keeps_its_teardown_waiting() -> None:
    """It meets a device's error as the worker does, and would end the process before a word of it
    is told; or its own watchdog would, once it has ended and its group is left. Over an error of
    NCCL's it looks up who called, for which it wants the interpreter, and sleeps four times what a
    dump may take, a minute: the end of its group waits for both."""
    assert WORKER_ENVIRONMENT["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert WORKER_ENVIRONMENT["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert WORKER_ENVIRONMENT["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert WORKER_ENVIRONMENT["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "0"


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_fp32_uses_tensor_cores_unless_told_not_to(tf32: bool, precision: str) -> None:
    before: Any = torch.get_float32_matmul_precision()
    try:
        devices.set_up(make_job(precision={"tf32": tf32}))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
