"""Whether an optimizer's state can be carried: found out on small tensors before all else."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from elastic_ft import torch_private
from elastic_ft.engines.optimizer_state import Make, OptimizerState, materialise
from elastic_ft.errors import ConfigError, one_line

WIDTH, STEPS, RATE = 4, 3, 0.01


def rehearse(make: Make, dimensions: Collection[int], *, sharded: bool) -> None:
    """A few steps of parameters with so many dimensions, and if need be of halves of them.

    Raises ConfigError, one line, for what the optimizer keeps and nothing can carry.
    """
    parameters = _parameters(dimensions)
    state = OptimizerState(make, parameters)
    name, before = type(state.optimizer).__name__, _attributes(state.optimizer)
    _run(state, parameters)
    if changed := sorted(_attributes(state.optimizer).items() ^ before.items()):
        raise ConfigError(
            f"optimizer.name: {name} keeps {changed[0][0]} as an attribute of its own: only state "
            "of parameters and of groups is carried"
        )
    if not sharded or dist.is_initialized():
        return  # in the second case, engines refuse the same
    with torch_private.pretended_world(2):
        mesh = DeviceMesh("cpu", [0, 1])
        halves = {
            key: nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            for key, parameter in parameters.items()
            if parameter.dim()
        }
        try:
            _run(OptimizerState(make, halves), halves)
        except ConfigError:
            raise
        except Exception as error:  # of many kinds: DTensor can't do what the optimizer does
            raise ConfigError(
                f"optimizer.name: {name} can't step where parameters are sharded, "
                f"parallel.strategy ddp has them whole: {one_line(error)}"
            ) from error


def begins_with_zeros(make: Make, dimensions: Collection[int]) -> bool:
    """Whether an optimizer goes on from a state of zeros as it begins by itself."""
    ends = []
    for zeros in (False, True):
        parameters = _parameters(dimensions)
        optimizer = make(parameters)
        if zeros:
            materialise(optimizer)
            for values in optimizer.state.values():
                for key, value in values.items():
                    values[key] = value.zero_() if isinstance(value, torch.Tensor) else value
        for step in range(STEPS):
            _set_gradients(parameters, step)
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
        ends.append(list(parameters.values()))
    return all(map(torch.equal, *ends))


def _parameters(dimensions: Collection[int]) -> dict[str, nn.Parameter]:
    return {f"of {d} dimensions": nn.Parameter(torch.ones((WIDTH,) * d)) for d in dimensions}


def _run(state: OptimizerState, parameters: Mapping[str, nn.Parameter]) -> None:
    state.clear()
    state.restored()
    for step in range(STEPS):
        _set_gradients(parameters, step)
        for group in state.optimizer.param_groups:
            group["lr"] = RATE
        with state.stepping():
            state.optimizer.step()
        for name in parameters:
            list(state.of(name))


def _set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5 + step)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {key: v for key, v in vars(optimizer).items() if type(v) in (int, float)}
