"""FSDP2's gathers of parameters and scatters of gradients as int8 (ZeRO++, Wang et al., 2023).

Nothing is kept from one to the next, so that there is no state. Every rank computes with the same
rounded weights, its own shard's among them; the optimizer steps the whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastic_ft.engines.int8 import all_gather, pack_blocks, unpack_blocks


class _Buffers:
    """torch asks for them; tests/tidy/test_torch_contract.py pins how."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Int8Gather(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        if not input_tensor.is_floating_point():  # parameters of several dtypes, as bytes
            all_gather(output_tensor, input_tensor, group=group)
            return
        own = pack_blocks(input_tensor.view(1, -1))
        everyones = own.new_empty(group.size(), *own.shape[1:])
        all_gather(everyones, own, group=group)
        rows = output_tensor.view(group.size(), -1)
        rows.copy_(unpack_blocks(everyones, rows.shape[1]))


class Int8Scatter(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
        codes = pack_blocks(input_tensor.view(group.size(), -1))
        own = torch.empty_like(codes)
        dist.all_to_all_single(own, codes, group=group)
        summed = unpack_blocks(own, output_tensor.numel()).sum(dim=0)
        output_tensor.copy_(summed / group.size() if op == dist.ReduceOp.AVG else summed)


def compress(unit: FSDPModule) -> None:
    """From now on ``unit``, that FSDP2 has cut over several ranks, sends int8."""
    unit.set_custom_all_gather(Int8Gather())  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(Int8Scatter())  # type: ignore[arg-type]
