"""An evaluation at the weights that a schedule-free optimizer averages: see ``schedule_free``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from elastic_ft.engines.laid_out import LaidOut
from elastic_ft.engines.modules import local_part


@contextmanager
def averaged(model: LaidOut) -> Iterator[None]:
    """Within it parameters are x. What is listed of the state is y, and so are they afterwards, to
    the last bit. They are written to in place: nobody may be copying them."""
    before, betas = dict(model.masters), _betas(model)
    moved = [n for n, p in before.items() if id(p) in betas and n not in model.kept.fresh]
    try:
        for name in moved:
            if before[name] is model.parameters[name]:
                model.masters[name] = before[name].detach().clone()
        for name in moved:
            z, beta = model.optimizer.state[before[name]]["z"], betas[id(before[name])]
            y = local_part(before[name].detach())
            _set(model, name, torch.lerp(y, local_part(z), 1.0 - 1.0 / beta))
        _gather_anew(model)
        yield
    finally:
        for name in moved:
            _set(model, name, model.masters[name])
        model.masters.update(before)
        _gather_anew(model)


def _betas(model: LaidOut) -> dict[int, float]:
    """By id, of each parameter that is stepped."""
    groups = model.optimizer.param_groups
    return {id(p): _beta(group) for group in groups for p in group["params"]}


def _beta(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group["momentum"])


@torch.no_grad()
def _set(model: LaidOut, name: str, value: torch.Tensor) -> None:
    local_part(model.parameters[name]).copy_(local_part(value))


def _gather_anew(model: LaidOut) -> None:
    """Whole weights that FSDP2 has are of before."""
    for module in (m for part in model.parts for m in part.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
