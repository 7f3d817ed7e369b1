"""What a script still has of a parameter that another object has taken the place of.

The first cut of a model makes new parameters (``own_cut``). Who kept the old ones would clip, or
average, what nothing trains any more, and not notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic_ft.errors import ConfigError

SHOWN = ("shape", "dtype", "device", "requires_grad", "is_leaf", "is_sparse", "ndim", "is_meta")
HARMLESS = {torch.Tensor.__hash__, *(getattr(torch.Tensor, name).__get__ for name in SHOWN)}


class Stale(nn.Parameter):
    """Refuses whatever is done with it, its looks aside."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        raise ConfigError(
            "ctx.prepare: a parameter from before the first batch is used: the model, which is "
            "cut, has another in its place: take references after the first batch, from the model"
        )


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """Nothing trains them any more. Their memory is free."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.__class__ = Stale
