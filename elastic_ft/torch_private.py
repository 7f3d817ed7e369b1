"""Every private name of torch in use; tests/tidy/test_torch_contract.py pins them."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode

_EXCEPTHOOK = sys.excepthook


class after_operations(TorchDispatchMode):
    """Calls ``then`` after so many tensor operations of the block."""

    def __init__(self, operations: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._then = operations, then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._left -= 1
        if self._left == 0:
            self._then()
        return result


def spoil_next_output(factor: float) -> None:
    """Multiplies the output of the next module that runs in this process."""

    def spoil(module: torch.nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        return output * factor if isinstance(output, torch.Tensor) else None

    handle = torch.nn.modules.module.register_module_forward_hook(spoil)


def queue_a_kernel_without_end() -> None:
    torch.cuda._sleep(1 << 62)  # cycles


def is_reduced(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether the last backward has reduced all gradients; else some are this rank's own."""
    try:
        module._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def is_owed(module: torch.nn.Module) -> bool:
    """Whether FSDP2 still keeps gradients that it has not summed over replicas."""
    groups = (group for part in module.modules() for group in _fsdp_groups(part))
    return any(group._partial_reduce_output is not None for group in groups)


def _fsdp_groups(part: torch.nn.Module) -> list[Any]:
    """Of parameters that FSDP2 gathers together for ``part``; torch 2.11 has one at most."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(part, FSDPModule):
        return []
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


CutParameter = Any  # FSDP2's: ``sharded_param`` is what modules and optimizers have


def cut_parameters(part: torch.nn.Module) -> list[CutParameter]:
    return [cut for group in _fsdp_groups(part) for cut in group.fsdp_params]


def is_cut_parameter(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


class _One:
    """In the place of the ranks that gather."""

    def size(self) -> int:
        return 1


def gather_nothing(part: torch.nn.Module) -> None:
    """FSDP2 gathers nothing for ``part``, whose parameters have no numbers on any rank: what copies
    out of what was gathered divides by their size on a GPU, and takes the process with it."""
    for group in _fsdp_groups(part):
        kind = type(group)
        group.__class__ = type(kind.__name__, (kind,), {"_all_gather_process_group": _One()})


def adopt(cut: CutParameter, parameter: torch.nn.Parameter) -> None:
    """``parameter`` is what FSDP2 shards from now on, in place of what it has made."""
    cut.sharded_param = parameter
    cut._setattr_on_modules(parameter)


def undo_fully_shard(part: Any) -> None:
    """``part`` is as it was before ``fully_shard``, with this rank's shards for parameters."""
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for cut in cut_parameters(part):  # what is registered may be gathered
        cut._setattr_on_modules(cut.sharded_param)
        cut.sharded_param.grad = None
    state = part._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for key in (STATE_KEY, REGISTRY_KEY):
        part.__dict__.pop(key, None)
    _composable_state._module_state_mapping.pop(part, None)
    part.__class__ = type(part).__mro__[2]  # fully_shard made a class of FSDPModule and this


def in_backward() -> bool:
    """This thread is in a backward: what is computed forward now was computed before."""
    return bool(torch._C._current_graph_task_id() != -1)


def set_group_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Sets the timeout of later collectives (forming has a shorter one of its own)."""
    c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def pin(memory: torch.Tensor) -> None:
    """Page-locks host memory that is mapped already, so that copies from the device overlap."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error):
        with contextlib.suppress(RuntimeError):  # the next kernel of this thread would be blamed
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {memory.numel():,} bytes: error {int(error)}")


def unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def page_locked(batch: Any, device: torch.device) -> Any:
    """As by a DataLoader's ``pin_memory``: ``batch`` where copies to ``device`` overlap.

    Raises RuntimeError where what is in it can't be, as what is on a device already; and what types
    of the user's raise as they are copied.
    """
    with torch.cuda.device(device):
        return torch.utils.data._utils.pin_memory.pin_memory(batch)


def empty_host_cache() -> None:
    """Gives back what torch has page-locked and no tensor uses any more: it keeps that for others
    of the same size, and ``torch.cuda.empty_cache`` leaves it."""
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()


def exchange_rows(
    rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all of rows, ``sent`` to and ``received`` from each rank of ``group``; gradients go
    back the same way."""
    found: torch.Tensor = _functional_collectives.all_to_all_single_autograd(
        rows, received, sent, group
    )
    return found


def split_dimension(
    mesh: dist.DeviceMesh, dimension: str, sizes: dict[str, int]
) -> dist.DeviceMesh:
    """The mesh with ``dimension`` split into others, by name, the outermost first. Makes groups."""
    return mesh._unflatten(dimension, tuple(sizes.values()), tuple(sizes))


# By c10d's OpType. Gloo gives its reduce-scatter none.
WORKS = dict.fromkeys((1, 2, 3), "all_reduce") | dict.fromkeys((4, 5, 6), "all_gather")
WORKS |= dict.fromkeys((9, 16, 100), "reduce_scatter") | dict.fromkeys((10, 11), "all_to_all")
WORKS |= dict.fromkeys((12, 13, 14), "send_recv") | {0: "broadcast"}
FUNCTIONAL = "functional"  # of those that are differentiated: which, their waits don't say


def on_waits(wanted: Callable[[], bool], told: Callable[[str, float], None]) -> None:
    """From now on, whenever a thread waits from Python for a collective and ``wanted`` says so, as
    it begins to, ``told`` is called: with the collective's kind, and the seconds."""
    of_work, of_tensor = dist.Work.wait, _functional_collectives.wait_tensor

    def wait(self: dist.Work, *args: Any, **options: Any) -> Any:
        if not wanted():
            return of_work(self, *args, **options)
        began_s = time.perf_counter()
        found = of_work(self, *args, **options)
        told(WORKS.get(self._get_op_type(), "other"), time.perf_counter() - began_s)
        return found

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not wanted():
            return of_tensor(tensor)
        began_s = time.perf_counter()
        found: torch.Tensor = of_tensor(tensor)
        told(FUNCTIONAL, time.perf_counter() - began_s)
        return found

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    _functional_collectives.wait_tensor = wait_tensor


def time_every(module: torch.nn.parallel.DistributedDataParallel, steps: int) -> None:
    """Has DDP time one in so many of its synchronised backwards, beside the first ten."""
    module._set_ddp_runtime_logging_sample_rate(steps)


def reducer_times(module: torch.nn.parallel.DistributedDataParallel) -> tuple[float, float]:
    """Of the last backward that DDP has timed, seconds from its first bucket's all-reduce to the
    end of all: after the gradients were there, when the thread but waits, and before."""
    module.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    found = module._get_ddp_logging_data()
    whole_ns = max(0, found.get("backward_comm_time", 0))
    hidden_ns = min(whole_ns, max(0, found.get("backward_compute_comm_overlap_time", 0)))
    return (whole_ns - hidden_ns) / 1e9, hidden_ns / 1e9


def nccl_backends() -> list[Any]:
    """Of every group that this process has made, newest first; their ``abort`` is ncclCommAbort."""
    found = []
    for group in reversed(list(c10d._world.pg_map)):
        with contextlib.suppress(RuntimeError):  # it has no CUDA backend
            found.append(group._get_backend(torch.device("cuda")))
    return [backend for backend in found if not isinstance(backend, dist.ProcessGroupGloo)]


def buffer_sync(wanted: bool) -> dict[str, bool]:
    """Tells DDP whether to sync buffers in each forward; torch 2.13 has another word for it."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: wanted}


def forget_forwards(runner: torch.nn.parallel.DistributedDataParallel) -> None:
    """Of those that no backward has followed: gradients are not waited for."""
    runner.reducer._reset_state()


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """What it has noted of optimizers since its last ``update``; one that is off notes nothing."""
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()


@contextmanager
def groups_made_by(make: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Each Gloo group that torch makes inside, each communicator of a world, and each group that it
    splits from another, is what ``make`` returns, told how to make it.

    Before that there is nothing to undo: torch knows of a group once it is connected.
    """
    real, backend = c10d.ProcessGroupGloo, torch._C._distributed_c10d.Backend
    split, eager = dist.ProcessGroup.split_group, backend.eager_connect_single_device
    # As it lies in its class: what the attribute gives would be bound to no instance any more.
    split_there = dist.ProcessGroup.__dict__["split_group"]

    def split_group(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return make(lambda: split(self, *args, **kwargs))

    def connect(self: Any, device: torch.device) -> Any:
        return make(lambda: eager(self, device))

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(lambda: real(*args, **kwargs))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Made(metaclass=Kind):
        """In the place of ``ProcessGroupGloo``, also for who asks what a group is."""

    c10d.ProcessGroupGloo = Made  # type: ignore[misc, assignment]
    dist.ProcessGroup.split_group = split_group  # type: ignore[method-assign]
    backend.eager_connect_single_device = connect  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = real  # type: ignore[misc]
        dist.ProcessGroup.split_group = split_there  # type: ignore[method-assign]
        backend.eager_connect_single_device = eager  # type: ignore[method-assign]


def import_lazy_parts() -> None:
    """What an optimizer's first step imports, without one: a step asks the CUDA driver whether a
    graph is being captured, and no process that is forked after that can use CUDA."""
    import torch._dynamo


def set_up_compiler(graphs_max: int) -> None:
    """So many graphs of one function before it runs eagerly. Compiling starts no process of its own
    that would hold this one's sockets open when it dies: peers would not notice.

    In every thread: torch 2.13 keeps what is set for the one that sets it, and a step is made, and
    on a GPU its backward compiled, in others."""
    import torch._dynamo.config
    import torch._inductor.config

    wanted: tuple[tuple[Any, str, int], ...] = (
        (torch._dynamo.config, "recompile_limit", graphs_max),
        (torch._inductor.config, "compile_threads", 1),
    )
    for config, name, value in wanted:
        setattr(config, name, value)
        config._config[name].default = value


def has_too_many_graphs(error: BaseException) -> bool:
    """Whether torch has raised ``error`` for another graph of a function that has all it may."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    found = (error, error.__cause__, error.__context__)
    return any(isinstance(each, FailOnRecompileLimitHit) for each in found)


def compiled_graphs() -> int:
    """Of this process so far, those from a cache included."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def pretended_world(size: int) -> Iterator[None]:
    """This process as rank 0 of a world in which nobody else is, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def process_groups() -> list[object]:
    """All that this process has made through torch.distributed."""
    return list(c10d._world.pg_map)


def end_groups(leave: bool = False) -> list[object]:
    """There is no group any more. ``leave``: they are returned as they are, and not ended.

    Groups are counted anew. torch does it when the world is destroyed, but not when its making
    failed: this worker's next world would then have another name than its peers'."""
    left = process_groups() if leave else []
    if leave:
        c10d._world.pg_names.clear()  # torch waits for the end of each that has one
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.group_count = 0
    return left


def name_groups(mesh: dist.DeviceMesh, dimension: str) -> None:
    """This rank's group of ``dimension`` is found by that name from now on. What is compiled has a
    group's name in it, and torch numbers groups anew in each generation: the number would be of no
    group, or of another one. No submesh may have been made yet."""
    group = mesh.get_group(dimension)
    c10d._unregister_process_group(group.group_name)
    group._set_group_name(dimension)
    c10d._world.pg_names[group] = dimension
    c10d._register_process_group(dimension, group)
    assert mesh.mesh_dim_names is not None
    mesh._dim_group_names[mesh.mesh_dim_names.index(dimension)] = dimension
    getattr(mesh, "_pg_registry", {})[dimension] = group  # since torch 2.12


def forget_meshes() -> None:
    """Drops what torch caches by mesh. Meshes of two generations compare equal, so these caches
    would hand out the groups of a generation that is gone."""
    from torch.distributed.tensor import _collective_utils, _random, _redistribute
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _random._rng_tracker = None
    local_shape_and_offset.cache_clear()
    sys.excepthook = _EXCEPTHOOK  # init_process_group replaces it


def as_part_of(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as the part that this rank has of a tensor which is cut as ``like`` is, on whatever
    device it may lie: ``DTensor.from_local`` would move it to the mesh's. As FSDP2 has shards that
    are offloaded."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return local
    make: Any = DTensor
    return make(local, like._spec, requires_grad=False)


@cache  # each snapshot asks for every tensor's
def local_shape_and_offset(
    shape: torch.Size, mesh: dist.DeviceMesh, placements: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local sizes, global offsets) of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    given: Any = placements
    if not any(isinstance(each, _StridedShard) for each in given):
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, given)
        return tuple(sizes), tuple(offsets)
    # FSDP2 cuts along this axis what another dimension has cut along it before. Of what is too
    # uneven torch 2.13 says what is not so: 7 over 2, and of these the 4 over 3.
    local, first = [*shape], [0] * len(shape)
    for number, each in sorted(enumerate(given), key=lambda at: isinstance(at[1], _StridedShard)):
        if each.is_replicate():
            continue
        chunk = -(-local[each.dim] // mesh.size(number))
        skipped = min(mesh.get_local_rank(number) * chunk, local[each.dim])
        first[each.dim] += skipped
        local[each.dim] = min(chunk, local[each.dim] - skipped)
    return tuple(local), tuple(first)
