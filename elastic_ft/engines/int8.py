"""Numbers as int8: blocks of 256 with one float32 scale each, so 1.016 bytes a number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
GREATEST = 127.0
# Of equal parts; torch 2.13 calls it another name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def pack_blocks(rows: Tensor) -> Tensor:
    """Codes of ``rows``, [n, numbers] of any floating dtype: uint8 [n, blocks, 260], each block's
    scale after it. Each row is filled up with zeros. What is not finite stays so."""
    blocks = pad(rows.float(), (0, -rows.shape[1] % BLOCK)).view(rows.shape[0], -1, BLOCK)
    tiny = torch.finfo(torch.float32).tiny
    scales = (blocks.abs().amax(dim=2, keepdim=True) / GREATEST).clamp_min(tiny)
    codes = (blocks / scales).round_().to(torch.int8).view(torch.uint8)
    return torch.cat([codes, scales.view(torch.uint8)], dim=2)


def unpack_blocks(codes: Tensor, numbers: int) -> Tensor:
    """What ``pack`` was given, float32 [n, numbers], off by half a scale at most."""
    scales = codes[:, :, BLOCK:].contiguous().view(torch.float32)
    return (codes[:, :, :BLOCK].view(torch.int8) * scales).flatten(1)[:, :numbers]
