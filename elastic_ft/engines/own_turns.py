"""The step of a function with several losses: its micro-batches go from loss to loss side by side.

What one loss has made the next may go back through, and nobody knows beforehand which is a model's
last. So DDP sends nothing there: gradients are summed once all have told a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def sum_over_ranks(parameters: Sequence[nn.Parameter], world_size: int) -> None:
    """Gradients become means over ranks; one that only others have is there then, too. A
    collective: all ranks list the same, on one device."""
    if world_size == 1 or not parameters:
        return
    has = torch.tensor([int(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, is_there in zip(parameters, has.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in kinds.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        pieces = flat.div_(world_size).split([g.numel() for g in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
