"""Gradients of zero for parameters that a rank's samples do not use.

An expert that gets no token, a branch that is not taken: what has no gradient on one rank and one
on another can't be reduced, by DDP (which waits for it) nor by FSDP2 (which leaves it out).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.errors import ConfigError

ParameterPlaces = list[tuple[nn.Module, str]]  # FSDP2 puts others there while it gathers


class _Use(torch.autograd.Function):
    """The first argument, as it is; the others' gradients are zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return output.clone()  # a view would not do where a model writes into it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        zeros = (torch.zeros((), dtype=d, device=on).expand(shape) for shape, d, on in ctx.like)
        return *gradients, *zeros


def use_all(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """From now on every trained parameter has a gradient after each backward through ``model``.

    ``blocks``: those that FSDP2 has wrapped, which has their parameters gathered there alone; each
    must be called.
    """
    inside: set[int] = set()
    for unit in [*blocks, model]:
        places = [
            (part, name)
            for part in unit.modules()
            if id(part) not in inside
            for name, parameter in part.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        inside.update(map(id, unit.modules()))
        if places:
            unit.register_forward_hook(_using(places), prepend=True)


def check_all_used(parameters: Mapping[str, nn.Parameter]) -> None:
    """After DDP's backward. Raises ConfigError if a trained parameter has no gradient: then others
    may not have been reduced."""
    unused = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    if unused:
        more = f" and {len(unused) - 1} more have" if len(unused) > 1 else " has"
        raise ConfigError(
            f"parallel.unused_parameters: {unused[0]}{more} no gradient on this rank; if samples "
            "need not use all parameters, say true"
        )


def _using(places: ParameterPlaces) -> Callable[..., Any]:
    def used(_: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        return _replaced(output, [getattr(part, name) for part, name in places])

    return used


def _replaced(output: Any, parameters: list[Tensor]) -> Any:
    """``output`` whose first tensor with a gradient uses ``parameters`` too."""
    if isinstance(output, Tensor):
        return _Use.apply(output, *parameters)
    if isinstance(output, Mapping):
        key = next((key for key, value in output.items() if _has_gradient(value)), None)
        if key is not None:
            output[key] = _Use.apply(output[key], *parameters)  # type: ignore[index]
        return output
    if isinstance(output, tuple | list):
        parts = list(output)
        at = next((at for at, value in enumerate(parts) if _has_gradient(value)), None)
        if at is not None:
            parts[at] = _Use.apply(parts[at], *parameters)
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
