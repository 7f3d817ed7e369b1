"""What a CPU can hold the CUDA branches to: devices, forks and streams, without a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_ft.config import Job
from elastic_ft.config.trained import BatchConfig
from elastic_ft.core.sharding import Box
from elastic_ft.data.dataset import DataBundle
from elastic_ft.engines import laid_out
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.faults import Points
from elastic_ft.groups import groups as groups_module
from elastic_ft.hosts.local import LocalHost
from elastic_ft.hosts.local.orders import StartProcess
from elastic_ft.state import snapshot
from elastic_ft.state.tensors import StateTensor
from elastic_ft.training.loader import bundle_of
from elastic_ft.transformers.memory import Generators
from elastic_ft.transport.control import Welcome
from elastic_ft.worker import prepare
from tests.oneproc.gpu_jobs import make_groups, make_job


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is seen; nothing can be done with it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


# --------------------------------------------------------------------------- what is read ahead


def test_batches_are_page_locked_by_who_reads_them_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the GPU that were said not to block did, as of memory that can be swapped out."""
    locked, on = list[tuple[str, list[float]]](), list[torch.device]()

    def pin_memory(tensor: torch.Tensor, *device: Any) -> torch.Tensor:
        if tensor.is_sparse:
            raise RuntimeError("cannot pin: only dense CPU tensors can be")
        locked.append((threading.current_thread().name, tensor.tolist()))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "device", lambda d: on.append(d) or contextlib.nullcontext())
    samples = [{"x": torch.tensor(float(n))} for n in range(8)]
    gpu, sizes = torch.device("cuda", 0), BatchConfig(global_batch_size=2, micro_batch_size=2)
    with prepare.prefetcher(bundle_of(samples, None, sizes), None, gpu) as reading:
        reading.request(1, [(0, 1)])
        assert reading.get(1)[0].data["x"].tolist() == [0.0, 1.0]
        reading.request(2, [(2, 3)])
        reading.cancel()  # another world deals others
        reading.request(2, [(4, 5)])
        reading.get(2)
    assert ("prefetch", [0.0, 1.0]) in locked and locked[-1] == ("prefetch", [4.0, 5.0])
    assert set(on) == {gpu}
    found = torch.eye(2).to_sparse()
    assert prepare.PageLocked(gpu)(found) is found  # copied as it is
    locked.clear()
    with prepare.prefetcher(bundle_of(samples, None, sizes), None, torch.device("cpu")) as reading:
        reading.request(1, [(0, 1)])
        reading.get(1)
    assert not locked


# ------------------------------------------------------------------- what workers fork from

SPIED = """
import traceback
import torch

calls = []

def spy(owner, name):
    real = getattr(owner, name, None)
    if real is None:
        return
    def wrapped(*args, **kwargs):
        caller = traceback.extract_stack()[-2]
        calls.append(f"{name} from {caller.filename}:{caller.lineno}")
        return real(*args, **kwargs)
    setattr(owner, name, wrapped)

for owner, names in (
    (torch._C, "_cuda_getDeviceCount _cuda_isCurrentStreamCapturing _cuda_init"),
    (torch._C, "_accelerator_getAccelerator"),
    (torch.cuda, "is_available device_count is_current_stream_capturing"),
    (torch.accelerator, "current_accelerator is_available current_stream"),
):
    for name in names.split():
        spy(owner, name)
import elastic_ft.worker.preload
print(*sorted(set(calls)), sep="\\n")
"""


def test_what_workers_fork_from_asks_nothing_of_cuda() -> None:
    """A process whose parent has called cuInit can't use CUDA: each worker would die of it."""
    done = subprocess.run(
        [sys.executable, "-c", SPIED], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.split() == []


# ---------------------------------------------------------------------- a worker's device


def device_of_worker(monkeypatch: pytest.MonkeyPatch, **parallel: Any) -> torch.device:
    """The one that its engine is given."""
    given: list[torch.device] = []

    class Engine:
        reference = None

        def __init__(self, job: Job, factory: Any, device: torch.device, tokens: int) -> None:
            self.device = device
            given.append(device)

        def prepare(self) -> None: ...

    nothing: Any = []
    data = DataBundle(nothing, None, 512, 8, "")
    tried: list[torch.device] = []
    monkeypatch.setattr(prepare, "burn_in", tried.append)
    monkeypatch.setattr(prepare, "open_dataset", lambda *_: data)
    monkeypatch.setattr(prepare, "engine_class", lambda _: Engine)
    monkeypatch.setattr(prepare, "Checkpointer", lambda *_: None)
    monkeypatch.setattr(prepare, "Prefetcher", lambda *_, **__: None)
    welcome = Welcome(make_job(parallel=parallel), "", "", ("localhost", 0))
    points = Points("w0", (), lambda index: None)
    prepare.prepare("w0", welcome, points, lambda message: None, lambda why: None)
    assert tried == [device for device in given if device.type == "cuda"]
    return given[0]


@pytest.mark.parametrize(
    ("parallel", "device"),
    [
        ({}, "cuda:0"),  # torch refuses to form over one without an index
        ({"backend": "nccl"}, "cuda:0"),
        ({"backend": "gloo"}, "cpu"),
        ({"backend": "gloo", "device": "cuda"}, "cuda:0"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_a_workers_device(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, str], device: str
) -> None:
    assert device_of_worker(monkeypatch, **parallel) == torch.device(device)


@pytest.mark.parametrize("parallel", [{"backend": "nccl"}, {"device": "cuda"}])
def test_a_job_for_gpus_never_trains_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"parallel\.device: .* sees none"):
        device_of_worker(monkeypatch, **parallel)


def test_nccl_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match=r"parallel: .*nccl.*cpu"):
        make_job(parallel={"backend": "nccl", "device": "cpu"})


@pytest.mark.parametrize(
    ("parallel", "backend", "bound"),
    [
        ({}, "cpu:gloo,cuda:nccl", "cuda:0"),
        ({"device": "cuda", "backend": "gloo"}, "gloo", None),
        ({"device": "cpu"}, "gloo", None),
    ],
)
def test_what_a_world_is_made_of(
    a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, str],
    backend: str,
    bound: str | None,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **keys: made.append((name, keys["device_id"]))
    )
    monkeypatch.setattr(groups_module, "make_mesh", lambda *_: None)
    groups = make_groups("fsdp", 1, backend=parallel.get("backend", "auto"))
    groups.store = groups._bare_store = dist.HashStore()
    device = device_of_worker(monkeypatch, **parallel)
    groups.uses_nccl = groups._is_for_nccl(device)
    groups._make_groups(device, lambda point: None)
    assert made == [(backend, bound and torch.device(bound))]


def test_a_trainer_that_draws_on_the_cpu_leaves_the_gpu_alone(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask its generator is to make a context there, of half a gigabyte, in each worker."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("the GPU is asked"))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: pytest.fail("the GPU is asked"))
    generators = Generators()
    kept = generators.state_dict()
    assert "cuda" not in kept
    generators.load_state_dict(kept | {"cuda": torch.zeros(16, dtype=torch.uint8)})


# ------------------------------------------------------------- what a host shows its workers


class Unstarted(LocalHost):
    """Its workers are noted instead: what each was to see."""

    def __init__(self, nodes: dict[str, int]) -> None:
        super().__init__(nodes)
        self.gpus: dict[str, dict[str, str]] = {}

    def _ask(self, message: Any) -> bool:
        if isinstance(message, StartProcess):
            self.gpus[message.name] = message.environment
        return True

    def lose(self, worker: str) -> None:
        self._on_end(replace(self._processes[worker].forked, ended=True, code=0))


def environments(
    monkeypatch: pytest.MonkeyPatch, visible: str, nodes: dict[str, int], lost: tuple[str, ...] = ()
) -> dict[str, dict[str, str]]:
    """Of the workers on ``nodes``, once those ``lost`` are replaced."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    host = Unstarted(nodes)
    host.want_workers(sum(nodes.values()))
    for worker in lost:
        host.lose(worker)
    return {worker: dict(os.environ) | host.gpus[worker] for worker in host._processes}


def shown(found: dict[str, dict[str, str]]) -> list[str]:
    return sorted(environment["CUDA_VISIBLE_DEVICES"] for environment in found.values())


def test_workers_of_one_machine_see_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environments(monkeypatch, "0,GPU-5,2,3", {"n0": 2, "n1": 2})
    assert shown(found) == ["0", "2", "3", "GPU-5"]
    assert not any("NCCL_HOSTID" in environment for environment in found.values())


def test_a_replacement_sees_the_gpu_of_who_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environments(monkeypatch, "0,1,2", {"n0": 3}, lost=("w1", "w0"))
    assert set(found) == {"w2", "w3", "w4"}
    assert shown(found) == ["0", "1", "2"]


def test_where_workers_share_a_gpu_each_is_a_host_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks of one host on one GPU, but not of two."""
    found = environments(monkeypatch, "0,1", {"n0": 4})
    assert shown(found) == ["0", "0", "1", "1"]
    for gpu in "01":
        sharing = [e for e in found.values() if e["CUDA_VISIBLE_DEVICES"] == gpu]
        assert len({e.get("NCCL_HOSTID") for e in sharing}) == 2


@pytest.mark.parametrize("visible", ["", "-1"])
def test_where_no_gpu_is_shown_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    found = environments(monkeypatch, visible, {"n0": 2})
    assert {env.get("CUDA_VISIBLE_DEVICES", "") for env in found.values()} == {visible}


def test_deepspeed_takes_the_device_that_the_worker_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets the device of number LOCAL_RANK, which Ray Train counts over the node."""
    from elastic_ft.engines import deepspeed, deepspeed_private

    seen: list[str] = []
    job = make_job(parallel={"engine": "deepspeed", "zero_stage": 0})
    engine = deepspeed.DeepSpeedEngine(
        job, lambda: torch.nn.Linear(2, 2), torch.device("cpu"), tokens_per_sample=8
    )
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(
        deepspeed_private, "_make_engine", lambda *_: seen.append(os.environ["LOCAL_RANK"])
    )
    engine.attach(make_groups("ddp", 1))
    assert seen == ["0"]


# ------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("optimizer", "device", "fused"),
    [
        ({}, "cuda", True),
        ({"name": "adam"}, "cuda", True),
        ({}, "cpu", True),
        ({"kwargs": {"foreach": True}}, "cuda", None),  # the job says how
        ({"kwargs": {"fused": False}}, "cuda", False),
    ],
)
def test_adam_steps_in_one_kernel(
    monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any], device: str, fused: bool | None
) -> None:
    made: list[torch.optim.Optimizer] = []

    def keep(make: Any, parameters: Any, *, staged: bool) -> Any:
        made.append(make(parameters))
        return SimpleNamespace(optimizer=made[-1])

    monkeypatch.setattr(laid_out, "OptimizerState", keep)
    monkeypatch.setattr(laid_out, "to_empty", lambda *_: None)
    job = make_job(optimizer=optimizer)
    factory = partial(torch.nn.Linear, 2, 2)
    laid_out.lay_out(job, factory, {}, torch.device(device), None)
    (optimizer_made,) = made
    assert optimizer_made.param_groups[0]["fused"] is fused


def test_a_fused_state_is_listed_as_any_other() -> None:
    """torch has the same kernel on the CPU."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    kinds = []
    for fused in (False, True):
        make = partial(make_optimizer, make_job().optimizer, fused=fused)
        state = OptimizerState(make, {"w": weight})
        assert state.optimizer.param_groups[0]["fused"] is (True if fused else None)
        kinds.append([(key, value.dtype, value.shape) for key, value in state.of("w")])
    assert kinds[0] == kinds[1]


# ------------------------------------------------------------------------------- snapshots


class Stream:
    """One of CUDA's; ``log`` has what is done with all of them."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self) -> str:
        self.log.append(f"record on {self.name}")
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"synchronize {self.name}")

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"leave {self.name}")


def test_a_snapshot_waits_for_what_was_queued_and_uses_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are queued behind the step, beside the next one, and done when it is sealed."""
    made: list[Stream] = []

    def make(_: torch.device) -> Stream:
        made.append(Stream(f"copies {len(made)}"))
        return made[-1]

    Stream.log.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("training"))
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copied: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        torch,
        "_foreach_copy_",
        lambda targets, sources, non_blocking: copied.append((len(sources), non_blocking)),
    )
    snapshot.copy_stream.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {
            "model.w": StateTensor((4, 3), Box.whole((4, 3)), torch.empty(4, 3, device="cuda")),
            "model.b": StateTensor((5,), Box.whole((5,)), torch.empty(5, device="cuda"), True),
        }
        shard: Any = SimpleNamespace(parts=lambda: [tensor.local for tensor in state.values()])
        for _ in range(2):
            source = snapshot._Source(state)
            assert source.state["model.w"].local is state["model.w"].local
            assert source.state["model.b"].local is not state["model.b"].local  # it may change
            source.copy_to(shard)
    snapshot.copy_stream.cache_clear()
    each = ["record on training", "copies 0 waits for training", "enter copies 0"]
    each += ["leave copies 0", "synchronize copies 0"]
    assert each * 2 == Stream.log
    assert len(made) == 1 and copied == [(2, True)] * 2


def test_a_snapshot_that_breaks_off_leaves_no_copy_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffer is another's next, or given back to the keeper, and what is read is freed."""

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("the last of them")

    Stream.log.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("training"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch, "_foreach_copy_", breaks)
    snapshot.copy_stream.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {"model.w": StateTensor((4,), Box.whole((4,)), torch.empty(4, device="cuda"))}
        shard: Any = SimpleNamespace(parts=lambda: [tensor.local for tensor in state.values()])
        source = snapshot._Source(state)
        with pytest.raises(RuntimeError, match="the last of them"):
            source.copy_to(shard)
    snapshot.copy_stream.cache_clear()
    assert Stream.log[-1] == "synchronize copies"
