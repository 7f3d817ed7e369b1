"""A module's own ``forward``, sent through what a generation wraps around it.

The user's module stays the object that it calls, with its hooks, its attributes and its names. What
is wrapped (DDP) goes to the class's ``forward``, so that hooks of the module run once.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic_ft.engines.left_behind import stays_inside

Forward = Callable[..., Any]


class Whole(nn.Module):
    """What DDP wraps: ``model`` without the call that has led here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return plain_forward(self.model)(*args, **kwargs)


def plain_forward(model: nn.Module) -> Forward:
    """As it was before it was routed."""
    routed = model.__dict__.get("forward")
    if isinstance(routed, Routed):
        return routed.before
    return model.forward


class Routed:
    """In the place of ``model.forward``. A deep copy of the model has its plain one, and so has
    what is pickled of it.

    Attributes:
        entered: through what is wrapped around it, since it was set to False last.
        is_ahead: no backward has come since.
    """

    def __init__(self, model: nn.Module, runner: Callable[[], nn.Module | None]) -> None:
        self._model, self._runner = model, runner
        self.before: Forward = model.forward
        self.entered, self.is_ahead = False, False
        self.__signature__ = inspect.signature(self.before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._runner()
        if runner is None or not torch.is_grad_enabled():
            return self.before(*args, **kwargs)
        self.entered, self.is_ahead = True, True
        if torch.compiler.is_compiling():
            return runner(*args, **kwargs)
        with stays_inside():
            return runner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """Of the copied model, which ``copy`` has made already when it comes to this."""
        copied = memo[id(self._model)]
        function = getattr(self.before, "__func__", type(self._model).forward)
        return types.MethodType(function, copied)

    def __reduce__(self) -> Any:
        function = getattr(self.before, "__func__", None)
        if function in (None, type(self._model).forward):
            return getattr, (self._model, "forward")
        return types.MethodType, (function, self._model)
