"""Gradients between a step's backward and its optimizer: whether all are summed, their norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines.expert_parallel import has_no_expert
from elastic_ft.engines.laid_out import LaidOut
from elastic_ft.engines.modules import local_part
from elastic_ft.engines.pipeline import TiedWeight
from elastic_ft.engines.unused import check_all_used
from elastic_ft.errors import ConfigError


def reduced(laid_out: LaidOut) -> list[torch.Tensor]:
    """This rank's; of a replicated weight, tensor-parallel peers have parts of the sum."""
    for parameter in laid_out.parameters.values():
        grad = parameter.grad
        if grad is None and has_no_expert(parameter):
            parameter.grad = torch.zeros_like(parameter)  # empty: it steps as on other ranks
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    if laid_out.tied is not None:
        laid_out.tied.sum_gradients()
    return present(laid_out)


def present(laid_out: LaidOut) -> list[torch.Tensor]:
    return [p.grad for p in laid_out.parameters.values() if p.grad is not None]


def check_reduced(laid_out: LaidOut, runner: nn.Module | None, replicas: int) -> None:
    """Raises ConfigError if gradients of earlier micro-batches were not reduced, for want of one
    in the last. Nothing is looked for where that can't be.

    ``replicas``: of each shard, of which FSDP2 keeps the sum to itself until a step's last.
    """
    parameters = laid_out.parameters.values()
    all_present = all(p.grad is not None for p in parameters if p.requires_grad)
    if isinstance(runner, DistributedDataParallel):
        check_all_reduced(laid_out.parameters, runner)
    elif replicas > 1 and not all_present:  # else the next step would have it
        _check(not any(map(torch_private.is_owed, laid_out.parts)))


def check_all_reduced(
    parameters: Mapping[str, nn.Parameter], runner: DistributedDataParallel
) -> None:
    """After the last backward through ``runner``, which has these. Raises ConfigError."""
    check_all_used(parameters)
    _check(torch_private.is_reduced(runner))


def _check(is_reduced: bool) -> None:
    if not is_reduced:
        raise ConfigError(
            "parallel.unused_parameters: a step's last micro-batch does not use all parameters "
            "on this rank; if samples need not, say true"
        )


@torch.no_grad()
def squares_of_shards(
    gradients: Sequence[torch.Tensor], layout: Layout, tied: TiedWeight | None
) -> torch.Tensor:
    """This rank's share of the squared norm of all gradients: a scalar that no one waited for."""
    norms = torch._foreach_norm([local_part(g) for g in gradients])
    ranks = layout.world_size // layout.pipeline_size
    squares = torch.stack(norms).double() ** 2
    replicas = _as_tensor(tuple(_copies(g, ranks, tied) for g in gradients), squares.device)
    return (squares / replicas).sum()


@lru_cache(maxsize=8)  # the same in each step, and to bring it to the device is to wait
def _as_tensor(copies: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(copies, device=device)


def _copies(gradient: torch.Tensor, ranks: int, tied: TiedWeight | None) -> int:
    """How many ranks have the same part of it: all that no dimension of a mesh cuts it over."""
    if tied is not None:
        ranks *= tied.copies(gradient)
    if not isinstance(gradient, DTensor):
        return ranks
    mesh, placed = gradient.device_mesh, enumerate(gradient.placements)
    cuts = (mesh.size(dim) for dim, placement in placed if not placement.is_replicate())
    return ranks // math.prod(cuts)


@torch.no_grad()
def scale(gradients: Sequence[torch.Tensor], norm: float, ratio: float, clip: float | None) -> None:
    """To ``ratio`` of what they are, and clipped; ``norm``: once they are scaled."""
    factor = ratio * (min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0)
    if factor != 1.0:
        torch._foreach_mul_([local_part(g) for g in gradients], factor)
