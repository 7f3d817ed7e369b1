"""The body of a plain loop, that has one micro-batch, as a step of the job, that has several.

It is called for each of this rank's micro-batches. All but the last call end in ``ctx.backward``:
what comes after it (clipping, the optimizer, the scheduler) is there once for each attempt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elastic_ft.errors import ConfigError
from elastic_ft.training.batch import Batch


class NextMicroBatch(BaseException):  # no Exception: a script's own ``except`` lets it through
    """Leaves the body: its gradients are there, and the next micro-batch comes."""


class MicroTurns:
    """One attempt at a step, micro-batch by micro-batch.

    Args:
        seen: equal to what it was, as long as nothing has changed gradients.
    """

    def __init__(self, batch: Batch, seen: Callable[[], Any]) -> None:
        self._micros, self._left = iter(batch), len(batch)
        self._seen, self._made = seen, None
        self._is_first, self._is_told = True, True
        self.was_left = False  # the body, by NextMicroBatch

    def given(self) -> Iterator[Any]:
        """Each micro-batch. Raises ConfigError where a call has told no loss."""
        while self._left:
            micro = next(self._micros)
            self._is_told, left = False, self._left
            yield micro
            if self._left == left or (left > 1 and not self.was_left):
                raise ConfigError(
                    "ctx.each: the function returned without ctx.backward(loss), or caught what "
                    "that raises: it stands where loss.backward() stood, in no bare `except:`"
                )

    @property
    def keeps_gradients(self) -> bool:
        """Whether they are of earlier micro-batches: ``zero_grad`` at a body's top leaves them."""
        return not self._is_first and not self._is_told

    def before_backward(self) -> None:
        """Raises ConfigError."""
        if self._is_told:
            raise ConfigError(
                "ctx.backward: came twice for a micro-batch: add the losses up, or take @ctx.step "
                "where each optimizer has a loss"
            )
        if not self._is_first and self._seen() != self._made:
            raise ConfigError(
                "ctx.each: gradients of the step's earlier micro-batches were changed: clear them "
                "by optimizer.zero_grad(), and change them after ctx.clip_grad_norm_"
            )

    def after_backward(self) -> None:
        """Raises NextMicroBatch, but for the last one."""
        self._is_told, self._is_first, self.was_left = True, False, False
        self._left -= 1
        if self._left:
            self._made = self._seen()
            raise NextMicroBatch
        next(self._micros, None)  # padding leaves no trace in buffers that the body looks at next


def arguments_of(function: Callable[..., Any]) -> Callable[[Any], tuple[Any, ...]]:
    """How it takes a micro-batch: in one argument, or in as many as there are parts."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    taken = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    if not taken:
        raise ConfigError("ctx.each: the function takes the micro-batch: def step(x, y) or (batch)")

    def arguments(micro: Any) -> tuple[Any, ...]:
        if len(taken) == 1:
            return (micro,)
        if not isinstance(micro, (tuple, list)) or len(micro) != len(taken):
            kind = type(micro).__name__.removeprefix("Weighed").lower()
            parts = f" of {len(micro)}" if isinstance(micro, (tuple, list)) else ""
            raise ConfigError(
                f"ctx.each: the function takes {len(taken)} arguments, a micro-batch is a "
                f"{kind}{parts}: one argument takes it whole"
            )
        return tuple(micro)

    return arguments


def keep_gradients(optimizers: list[torch.optim.Optimizer], keep: Callable[[], bool]) -> None:
    """While ``keep()``, their ``zero_grad`` has no effect. A copy of one has its plain method."""

    def guarded(plain: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if not keep():
                plain(*args, **kwargs)

        return zero_grad

    for optimizer in optimizers:
        optimizer.zero_grad = guarded(optimizer.zero_grad)  # type: ignore[method-assign]
