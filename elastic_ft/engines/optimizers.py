"""From the job's ``optimizer`` section to an optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ft.config import OptimizerConfig
from elastic_ft.config.trained import SCHEDULE_FREE
from elastic_ft.engines.learning_rates import grouped
from elastic_ft.engines.muon import MuonWithAdamW
from elastic_ft.engines.optimizer_state import materialise
from elastic_ft.engines.schedule_free import make_schedule_free
from elastic_ft.errors import ConfigError

WAYS_TO_STEP = {"foreach", "fused", "capturable", "differentiable"}  # of torch's Adam
# Their steps have no collective.
LOCAL_OPTIMIZERS = ("adamw", "adam", "sgd", "muon", *SCHEDULE_FREE)


def make_optimizer(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Returns the optimizer of ``parameters``, which have their names in the whole model.

    ``fused``: Adam and AdamW in one kernel, unless the job says how they are to step. It reads and
    writes all once, where torch's default makes temporaries of the parameters' size. torch has it
    for floating point alone, and for parameters that are all cut over one mesh or none at all (a
    tensor-parallel plan may cut some): it says so only in a step.
    """
    groups = grouped(config, parameters)
    adam = {"lr": config.lr, "betas": config.betas, "eps": config.eps, **config.kwargs}
    members = [p for group in groups for p in group["params"]]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in members}
    can_fuse = len(meshes) <= 1 and all(p.is_floating_point() for p in members)
    if fused and can_fuse and not WAYS_TO_STEP & config.kwargs.keys():
        adam["fused"] = True
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if config.name == "adam":
        return torch.optim.Adam(groups, **adam)
    if config.name == "muon":
        return MuonWithAdamW(groups, **adam)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, **config.kwargs)
    if config.is_schedule_free:
        return make_schedule_free(config, groups, together=len(meshes) <= 1)
    return _optimizer_class(config.name)(groups, lr=config.lr, **config.kwargs)


def _optimizer_class(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.name: {path!r} is neither of {', '.join(LOCAL_OPTIMIZERS)} nor importable: "
            f"{error}"
        ) from None


def warm_optimizer(config: OptimizerConfig) -> None:
    """The first step of an optimizer imports a lot (torch._dynamo): before anyone waits."""
    weight = nn.Parameter(torch.zeros(2, 2))
    materialise(make_optimizer(config, {"weight": weight}, fused=True))
