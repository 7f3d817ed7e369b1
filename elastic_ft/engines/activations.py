"""What layers keep for backward: everything, what is dear to compute again, or their inputs alone;
and whether it waits on the device or in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from elastic_ft.torch_private import CheckpointImpl, checkpoint_wrapper

OFFLOADED_BYTES_MIN = 1 << 20  # of a tensor: what is smaller is not worth a copy

# Of an operator's overloads all: products and attention are what a layer's time goes into, and
# what is reduced between ranks was sent. Gathered inputs are large, and are gathered again.
KEPT_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
    }
)
# FSDP2 marks more for the profiler as a layer is computed again than at first: of a unit in it that
# is cut among few, more than torch has noted, which it takes for another computation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def checkpoint_activations(
    module: nn.Module, blocks: Sequence[nn.Module], kept: Literal[True, "selective"] = True
) -> list[nn.Module]:
    """Recomputes each block's activations in backward. Returns the wrapped blocks.

    ``kept``: True keeps a block's inputs alone; "selective" what KEPT_OPERATORS return too.
    """
    options = {}
    if kept == "selective":
        options["context_fn"] = _SELECTIVE
    wanted, wrapped = {id(block) for block in blocks}, []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wanted:
                wrapper = checkpoint_wrapper(
                    child, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options
                )
                parent.register_module(name, wrapper)
                wrapped.append(wrapper)
    return wrapped


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator.name().partition(".")[0] in KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# One object: compiled code is kept by which it is.
_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)


def keep_in_host_memory(blocks: Sequence[nn.Module], bytes_min: int = OFFLOADED_BYTES_MIN) -> None:
    """From now on what ``blocks`` keep for backward, but parameters, waits in host memory.

    Copies run on the stream that computes, so that nothing is read too early, and are not hidden
    behind it. On a GPU host memory is pinned, which torch's allocator keeps for the next copies.
    """
    for block in blocks:
        block.forward = partial(_offloaded, block, block.forward, bytes_min)


def _offloaded(block: nn.Module, forward: Any, bytes_min: int, *args: Any, **kwargs: Any) -> Any:
    def is_weight(tensor: torch.Tensor) -> bool:
        """Asked of each: FSDP2 gathers shared-out experts inside their layer's forward."""
        return _storage(tensor) in map(_storage, block.parameters())

    def to_host(tensor: torch.Tensor) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < bytes_min or is_weight(tensor):
            return tensor, None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        pinned = local.device.type == "cuda"
        host = torch.empty_like(local, device="cpu", pin_memory=pinned)
        host.copy_(local, non_blocking=pinned)
        placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        return host, (local.device, placed, tensor.shape, tensor.stride())

    def back(packed: Any) -> torch.Tensor:
        tensor, where = packed
        if where is None:
            return tensor
        device, placed, shape, stride = where
        local = tensor.to(device, non_blocking=True)
        if placed is None:
            return local
        return DTensor.from_local(local, *placed, run_check=False, shape=shape, stride=stride)

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        return forward(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
