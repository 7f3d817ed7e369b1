"""Every private name of DeepSpeed in use; tests/tidy/test_deepspeed_contract.py pins them.

Imported only where its engine is used: ``import deepspeed`` takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class Slice:
    """What this rank's flat partition has of one parameter, padding left out.

    Attributes:
        shape: of the whole parameter.
        start: of this part in the flattened parameter; ``numel`` elements follow.
        flat: the fp32 partition, which is also the optimizer's key for its state.
        offset: of this part in ``flat``.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    flat: torch.Tensor
    offset: int


def import_deepspeed(device: torch.device) -> None:
    """Must come before any other function here. DeepSpeed chooses its device while importing."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    from deepspeed.utils.logging import logger

    logger.setLevel(logging.ERROR)
    # Else the first backend compiles an extension for shared memory, which takes minutes.
    deepspeed.ops.__compatible_ops__ = {}
    _import_lazy_parts()


def _import_lazy_parts() -> None:
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.stage3  # noqa: F401


def make_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
) -> Any:
    """``deepspeed.initialize`` over the world, without copying rank 0's parameters to the others:
    their values come later. DeepSpeed makes no group of its own (ours can be aborted, and have
    the right timeouts)."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # it sets the device of that number; Ray
    return _make_engine(module, optimizer, config)  # Train counts ranks over the node with it


def _make_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
) -> Any:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    class Engine(DeepSpeedEngine):
        def _broadcast_model(self) -> None:
            """Not needed."""

    comm.init_distributed(dist_init_required=False)
    groups._WORLD_GROUP = dist.group.WORLD
    with _partitioning_without_broadcasts():
        return Engine(
            args=None,
            model=module,
            optimizer=optimizer,
            config=config,
            config_class=DeepSpeedConfig(config),
        )


@contextlib.contextmanager
def _partitioning_without_broadcasts() -> Iterator[None]:
    from deepspeed.runtime.zero.partition_parameters import Init

    def partition(init: Any, parameter: Any) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    original = Init._zero_init_param
    Init._zero_init_param = partition
    try:
        yield
    finally:
        Init._zero_init_param = original


# --------------------------------------------------------------------------------- state


def slices(engine: Any, stage: int) -> Iterator[Slice]:
    """This rank's part of every trained parameter, parts of no elements included (stage 1 to 3)."""
    yield from _slices_of_weights(engine) if stage == 3 else _slices_of_gradients(engine)


def _slices_of_gradients(engine: Any) -> Iterator[Slice]:
    """ZeRO-1 and 2: the parameters of a group one after the other, cut into as many equal parts
    as there are ranks. In the module's order, as ``round_robin_gradients`` is off."""
    zero = engine.optimizer
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        first = dist.get_rank() * flat.numel()
        at = 0
        for parameter in zero.bit16_groups[index]:
            shape, numel = tuple(parameter.shape), parameter.numel()
            start, stop = max(at, first), min(at + numel, first + flat.numel())
            if start >= stop:
                yield Slice(engine.param_names[parameter], shape, 0, 0, flat, 0)
            else:
                name = engine.param_names[parameter]
                yield Slice(name, shape, start - at, stop - start, flat, start - first)
            at += numel


def _slices_of_weights(engine: Any) -> Iterator[Slice]:
    """ZeRO-3: each parameter flattened, and cut into as many equal parts as there are ranks."""
    zero = engine.optimizer
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        offset = 0
        for parameter in zero.fp16_groups[index]:
            size = parameter.partition_numel()
            start = min(dist.get_rank() * size, parameter.ds_numel)
            numel = min(size, parameter.ds_numel - start)
            name, shape = engine.param_names[parameter], tuple(parameter.ds_shape)
            yield Slice(name, shape, start, numel, flat, offset)
            offset += size


def flats(engine: Any, stage: int) -> list[tuple[int, torch.Tensor]]:
    """(index of the optimizer's group, fp32 partition) of all that this rank's optimizer steps."""
    zero = engine.optimizer
    if stage == 3:
        return [(zero.sub_group_to_group_id[i], flat) for i, flat in _enumerated(zero)]
    return list(enumerate(zero.single_partition_of_fp32_groups))


def _enumerated(zero: Any) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(zero.fp32_partitioned_groups_flat))


@torch.no_grad()
def weights_from_masters(engine: Any, stage: int) -> None:
    """Refreshes the weights that forward uses from the fp32 partitions. A collective."""
    zero = engine.optimizer
    if stage in (1, 2):
        zero.update_lp_params()
        return
    for index, flat in _enumerated(zero):
        zero.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
        zero._unflatten_partitioned_parameters(index)
    kept_whole = list(zero.persistent_parameters)
    if kept_whole:
        kept_whole[0].partition(kept_whole)
        kept_whole[0].all_gather(kept_whole)


# ------------------------------------------------------------------------------- training


def overflowed(engine: Any) -> bool:
    """Whether the last step found a gradient that is not finite, and applied nothing."""
    return bool(getattr(engine.optimizer, "overflow", False))


# ------------------------------------------------------------------------------- teardown


def destroy_engine(engine: Any) -> None:
    """Takes the engine apart: hooks, patches, and what parameters remember of it."""
    module = engine.module
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for parameter in module.parameters():
        parameter.grad = None
        for name in list(vars(parameter)):
            with contextlib.suppress(AttributeError):
                delattr(parameter, name)
    engine.optimizer = engine.basic_optimizer = None


def reset_globals() -> None:
    """What DeepSpeed keeps of a world that is gone. Once per generation, whatever became of it."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    parameter_offload.FWD_MODULE_STACK.clear()
    patched = partition_parameters.InsertPostInitMethodToModuleSubClasses
    if hasattr(patched, "linear_bk"):
        torch.nn.functional.linear = patched.linear_bk  # stage 3 replaces it for all modules
    # Ranks compare the numbers of their parameters and modules, and a joiner's begin at 0.
    partition_parameters.Init.param_id = 0
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][:] = [0]
    partition_parameters.zero_init_context = 0
    partition_parameters.top_level_context = None
    partition_parameters.empty_buffers.clear()
    partition_parameters.temp_contiguous_tensor = None
