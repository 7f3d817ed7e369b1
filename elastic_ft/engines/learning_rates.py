"""Learning rates of a job's steps and groups of parameters, a schedule of the user's included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from elastic_ft.config import OptimizerConfig, ParameterGroup
from elastic_ft.core import schedule
from elastic_ft.engines.muon import MATRIX, MATRIX_DIMENSIONS, is_inner_matrix
from elastic_ft.errors import ConfigError, one_line
from elastic_ft.models.imports import import_object

SCALE = "lr_scale"  # key of an optimizer's group: what its rate is of the schedule's
KEY = "optimizer.schedule"


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The schedule's rate of ``step`` (1-based) of ``steps``. Raises ConfigError."""
    factor = _imported(config.schedule) if ":" in config.schedule else None
    try:
        rate = schedule.scheduled_rate(config, steps, step, factor)
    except Exception as error:  # the user's function may raise anything
        text = f"{KEY}: {config.schedule}({step}, {steps}) failed: {one_line(error)}"
        raise ConfigError(text) from error
    if factor is not None and not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"{KEY}: {config.schedule}({step}, {steps}) makes the rate {rate}")
    return rate


@lru_cache(maxsize=16)
def _imported(path: str) -> schedule.Factor:
    factor = import_object(path, KEY, ConfigError)
    if not callable(factor):
        raise ConfigError(f"{KEY}: expected a callable, {path!r} is {type(factor).__name__}")
    return factor


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """``rate``: the schedule's."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SCALE, 1.0)


def grouped(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
    """The trained ``parameters``, by name in the whole model, as groups for an optimizer.

    Unless a group of the job's says otherwise, vectors (norms, biases) are not decayed, and Muon's
    are inner matrices.
    """
    found: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        own = _group_of(config.groups, name)
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        rate = config.lr if own is None or own.lr is None else own.lr
        inner = is_inner_matrix(name, parameter)
        if own is not None and own.muon is not None:
            inner = own.muon and parameter.dim() in MATRIX_DIMENSIONS
        matrix = inner and config.name == "muon"
        found.setdefault((decay, rate, matrix), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay}
        | ({} if rate == config.lr else {"lr": rate, SCALE: rate / config.lr})
        | ({MATRIX: True} if matrix else {})
        for (decay, rate, matrix), members in found.items()
    ]


def _group_of(groups: Iterable[ParameterGroup], name: str) -> ParameterGroup | None:
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def check_groups(config: OptimizerConfig, model: nn.Module) -> None:
    """Raises ConfigError for a group that no trained parameter of the whole model is in."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    used = {id(_group_of(config.groups, name)) for name in trained}
    for number, group in enumerate(config.groups):
        if id(group) not in used:
            raise ConfigError(
                f"optimizer.groups.{number}.match: {group.match!r} is no trained parameter that "
                f"an earlier group leaves; they are named as {', '.join(trained[:2])}"
            )
