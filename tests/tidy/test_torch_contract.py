"""Every private name of torch that ``torch_private`` uses is there, and does what we count on.

A new torch that moves one of them fails here, by name, and not in the middle of a recovery.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_ft import torch_private
from elastic_ft.controller.host import WORKER_ENVIRONMENT

RUNTIME = Path(torch_private.__file__).parent
CALLABLES = {
    "torch.distributed.distributed_c10d:_set_pg_timeout": ["timeout", "group"],
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache": [],
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache": [],
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": [
        "global_shape",
        "mesh",
        "placements",
    ],
    "torch.distributed._functional_collectives:all_to_all_single_autograd": [
        "self",
        "output_split_sizes",
        "input_split_sizes",
        "group",
    ],
    "torch.distributed.device_mesh:DeviceMesh._unflatten": [
        "self",
        "dim",
        "mesh_sizes",
        "mesh_dim_names",
    ],
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper": [
        "module",
        "checkpoint_impl",
    ],
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized": ["self"],
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data": ["self"],
    "torch.nn.parallel:DistributedDataParallel._set_ddp_runtime_logging_sample_rate": [
        "self",
        "sample_rate",
    ],
    "torch.distributed._functional_collectives:wait_tensor": ["tensor"],
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": ["self"],
    "torch.distributed.fsdp:FSDPModule.set_custom_all_gather": ["self", "comm"],
    "torch.distributed.fsdp:FSDPModule.set_custom_reduce_scatter": ["self", "comm"],
    # What engines.shard_comm is called as.
    "torch.distributed.fsdp._fully_shard._fsdp_api:Comm.allocate": [
        "self",
        "size",
        "dtype",
        "device",
    ],
    "torch.distributed.fsdp._fully_shard._fsdp_api:AllGather.__call__": [
        "self",
        "output_tensor",
        "input_tensor",
        "group",
        "async_op",
    ],
    "torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter.__call__": [
        "self",
        "output_tensor",
        "input_tensor",
        "group",
        "op",
        "async_op",
    ],
    "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__": [
        "self",
        "func",
        "types",
        "args",
        "kwargs",
    ],
}
CACHED = (
    "torch.distributed.tensor._redistribute:_gen_transform_infos",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_cached",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh",
)


def find(path: str) -> Any:
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("path", "parameters"), CALLABLES.items())
def test_is_callable_with_these_parameters(path: str, parameters: list[str]) -> None:
    found = list(inspect.signature(find(path)).parameters)
    assert found[: len(parameters)] == parameters


@pytest.mark.parametrize("path", CACHED)
def test_has_a_cache_to_clear(path: str) -> None:
    assert callable(find(path).cache_clear)


def test_a_kernel_can_be_made_to_last() -> None:
    assert callable(torch.cuda._sleep)


def test_page_locked_memory_can_be_given_back() -> None:
    if torch.version.cuda is not None:  # a torch for CPUs has no such cache
        assert callable(torch._C._host_emptyCache)
    torch_private.empty_host_cache()


def test_the_random_tracker_is_a_module_variable() -> None:
    assert hasattr(importlib.import_module("torch.distributed.tensor._random"), "_rng_tracker")


def test_group_backends_can_be_asked_for() -> None:
    assert callable(dist.ProcessGroup._get_backend)
    assert callable(dist.ProcessGroupGloo.abort)
    assert callable(dist.ProcessGroup.split_group)  # torch's own function asks it, and may wait
    assert "parent_pg.split_group(" in inspect.getsource(distributed_c10d.split_group)
    eager = torch._C._distributed_c10d.Backend.eager_connect_single_device
    helper = inspect.getsource(distributed_c10d._new_process_group_helper)
    assert callable(eager) and "eager_backend.eager_connect_single_device(" in helper
    if dist.is_nccl_available():
        assert callable(dist.ProcessGroupNCCL.abort)


def test_what_workers_tell_nccls_groups_is_read_by_them() -> None:
    """But for what no header names."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    known = (folder / "ProcessGroupNCCL.hpp").read_text()
    told = {name for name in WORKER_ENVIRONMENT if name.startswith("TORCH_NCCL_")}
    unnamed = {name for name in told if f'"{name}"' not in known}
    assert len(told) > 2 and unnamed == {"TORCH_NCCL_USE_COMM_NONBLOCKING"}


def test_works_of_collectives_say_their_kind_and_can_be_waited_for() -> None:
    """``torch_private.on_waits`` replaces ``wait``; tests/oneproc/test_overlap.py waits."""
    assert callable(dist.Work._get_op_type) and callable(dist.Work.wait)


def test_ddp_takes_what_it_is_told_about_buffers() -> None:
    """torch 2.13 calls ``forward_sync_buffers`` what 2.11 calls ``broadcast_buffers``."""
    taken = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    assert {"init_sync", "gradient_as_bucket_view"} <= taken.keys()
    for wanted in (True, False):
        told = torch_private.buffer_sync(wanted)
        assert told.keys() <= taken.keys() and list(told.values()) == [wanted]


class Two(torch.nn.Module):
    """A sum of the parts that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))

    def forward(self, parts: tuple[int, ...], x: torch.Tensor) -> Any:
        return sum(self.parts[part](x) for part in parts)


def test_ddp_tells_whether_it_has_reduced_all() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Two()
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        assert torch_private.is_reduced(ddp)
        for parts, reduced in (((0, 1), True), ((0,), False)):
            ddp(parts, torch.ones(1)).backward()
            assert torch_private.is_reduced(ddp) is reduced
    finally:
        dist.destroy_process_group()


def test_ddp_forgets_a_forward_that_no_backward_followed() -> None:
    """Else the next backward would be reduced, whatever it is told by then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module, sent = Two(), list[int]()
        ddp = torch.nn.parallel.DistributedDataParallel(module)

        def send(state, bucket):  # torch wants real annotations, or none
            sent.append(bucket.index())
            done = torch.futures.Future[torch.Tensor]()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, send)
        for forgotten in (False, True):
            ddp((0, 1), torch.ones(1)).detach()
            if forgotten:
                torch_private.forget_forwards(ddp)
            sent.clear()
            with ddp.no_sync():
                ddp((0, 1), torch.ones(1)).backward()
            assert bool(sent) is not forgotten
    finally:
        dist.destroy_process_group()


def test_a_scaler_forgets_what_it_has_unscaled() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    torch_private.forget_unscaled(scaler)
    scaler.unscale_(optimizer)  # else it raises


def test_hsdp_tells_what_it_still_keeps() -> None:
    """Of a unit that the micro-batch which sums over replicas does not use."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        module = Two()
        for part in (*module.parts, module):
            fully_shard(part, mesh=mesh)
        for parts, owed in (((0, 1), False), ((0,), True)):
            for last, used in ((False, (0, 1)), (True, parts)):
                module.set_requires_all_reduce(last)
                module(used, torch.ones(1, 1)).backward()
            assert torch_private.is_owed(module) is owed
    finally:
        dist.destroy_process_group()
        torch_private.forget_meshes()


def test_what_is_cut_twice_along_an_axis_is_where_fsdp_has_it() -> None:
    """Seven rows over two, and what each of them has over three: 2, 2, 0 and 1, 1, 1. torch's own
    ``compute_local_shape_and_global_offset`` says that the third has one."""
    rows: list[int] = []
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = init_device_mesh("cpu", (6,), mesh_dim_names=("all",))
            mesh = torch_private.split_dimension(mesh, "all", {"outer": 3, "inner": 2})
            module = torch.nn.Module()
            weight = distribute_tensor(torch.empty(7, 2), mesh["inner"], [Shard(0)])
            module.weight = torch.nn.Parameter(weight)
            fully_shard(module, mesh=mesh["outer"])
            cut = module.weight
            assert isinstance(cut, DTensor)
            sizes, offsets = torch_private.local_shape_and_offset(
                cut.shape, cut.device_mesh, cut.placements
            )
            assert sizes == tuple(cut.to_local().shape)
            rows += range(offsets[0], offsets[0] + sizes[0])
            assert (rank % 2 == 0) == (offsets[0] < 4) or not sizes[0]
        finally:
            dist.destroy_process_group()
            torch_private.forget_meshes()
    assert sorted(rows) == [*range(7)]


def test_a_world_that_failed_to_form_leaves_the_group_count_behind() -> None:
    """``end_groups`` sees to it: the next world would have another name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = datetime.timedelta(milliseconds=50)
    assert distributed_c10d._world.group_count == 0
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timeout)
    assert not dist.is_initialized()
    assert distributed_c10d._world.group_count == 1
    assert torch_private.end_groups() == []
    assert distributed_c10d._world.group_count == 0


def test_forgetting_restores_the_excepthook() -> None:
    hook = sys.excepthook
    try:
        sys.excepthook = lambda *_: None
        torch_private.forget_meshes()
        assert sys.excepthook is torch_private._EXCEPTHOOK
    finally:
        sys.excepthook = hook


def test_timeouts_of_a_group_can_be_changed() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_private.set_group_timeout(dist.group.WORLD, 7.0)
    finally:
        dist.destroy_process_group()


def private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        else:
            continue
        for name in names:
            if any(part.startswith("_") and part != "_C" for part in name.split(".")):
                yield name


@pytest.mark.parametrize("path", sorted(RUNTIME.rglob("*.py")), ids=lambda path: path.name)
def test_no_other_module_imports_private_names(path: Path) -> None:
    if path.name == "torch_private.py":
        return
    found = set(private_imports(path))
    assert not found, f"{path.name} imports {sorted(found)}; put it into torch_private.py"


def test_a_cut_module_can_be_made_as_it_was() -> None:
    """What ``undo_fully_shard`` takes away: class, hooks, and what torch knows of the module."""
    with torch_private.pretended_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = torch.nn.Linear(4, 4)
        kind, hooks = type(model), len(model._forward_pre_hooks) + len(model._forward_hooks)
        for _ in range(2):
            fully_shard(model, mesh=mesh)
            (weight, bias) = (cut.sharded_param for cut in torch_private.cut_parameters(model))
            assert (model.weight, model.bias) == (weight, bias)
            torch_private.undo_fully_shard(model)
            assert type(model) is kind
            assert len(model._forward_pre_hooks) + len(model._forward_hooks) == hooks
            assert torch_private.is_cut_parameter(model.weight)
            for name in ("weight", "bias"):
                setattr(model, name, torch.nn.Parameter(torch.ones(getattr(model, name).shape)))


def test_what_is_replaced_while_groups_form_is_put_back_as_it_was() -> None:
    """A script's own ``group.split_group`` was a TypeError after the first forming."""
    of = dist.ProcessGroup, torch._C._distributed_c10d.Backend
    before = [{**kind.__dict__} for kind in of]
    with torch_private.groups_made_by(lambda make: make()):
        assert dist.ProcessGroup.__dict__["split_group"] is not before[0]["split_group"]
    assert [{**kind.__dict__} for kind in of] == before
