"""What a script has made or asked of torch's own classes, noted so that it need not say it again.

- Schedulers and gradient scalers, which are state of the job as soon as their optimizer is.
- ``loss.backward()`` in the function of ``ctx.each``, which is the micro-batch's loss.
- The length of a DataLoader that is not prepared yet counts micro-batches. Schedules are made of
  it, of total_steps = len(loader) * epochs, say: one of a script that was accumulating gradients,
  or dealt its samples over processes, would be as many times too long.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elastic_ft.config.trained import BatchConfig
from elastic_ft.training.forgotten import reachable
from elastic_ft.training.torchrun import watch_wrappers

_asked: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
_made: list[LRScheduler | torch.amp.GradScaler] = []  # before the first batch; in their order


def _nobody() -> None:
    """There is no context yet."""


_current: Callable[[], Any] = _nobody


def watch(current: Callable[[], Any]) -> None:
    """From now on, in this process, for the context that ``current`` returns."""
    global _current
    _current = current
    _made.clear()
    if hasattr(DataLoader.__len__, "__wrapped__"):
        return
    DataLoader.__len__ = _length(DataLoader.__len__)  # type: ignore[method-assign]
    for kind in (LRScheduler, torch.amp.GradScaler):  # not each has its base's ``__init__`` called
        kind.__new__ = _noted  # type: ignore[assignment]
    torch.amp.GradScaler.scale = _scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]
    torch.Tensor.backward = _backward(torch.Tensor.backward)  # type: ignore[method-assign]
    watch_wrappers(lambda: _current())


def _length(plain: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(plain)
    def noted(loader: DataLoader[Any]) -> int:
        _asked.add(loader)
        return plain(loader)

    return noted


def _noted(kind: type, *args: Any, **kwargs: Any) -> Any:
    thing, context = object.__new__(kind), _current()
    if context is None or not context.has_begun:
        _made.append(thing)
    return thing


def _scale(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = plain(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and scaled is not outputs:
            scaled.scaled_by = scaler, outputs  # for its ``backward``
        return scaled

    return scale


def _backward(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        context = _current()
        if args or kwargs or context is None or not context.takes_losses:
            return plain(loss, *args, **kwargs)
        scaler, unscaled = getattr(loss, "scaled_by", (None, loss))
        return context.backward(unscaled, scaler=scaler)

    return backward


def found_for(
    optimizers: Sequence[Optimizer], known: Iterable[Any]
) -> Iterator[tuple[str, LRScheduler | torch.amp.GradScaler]]:
    """Of what was noted that which is of these optimizers, by name, but for what is ``known`` or
    a part of that; and all scalers. Nothing is noted any more."""
    made, kept = _made[:], reachable(known)
    _made.clear()
    for number, thing in enumerate(made):
        of = getattr(thing, "optimizer", None)
        is_ours = any(of is one for one in optimizers) or isinstance(thing, torch.amp.GradScaler)
        whole = [one for one in made if one is not thing and id(thing) in reachable([one])]
        if is_ours and id(thing) not in kept and not whole:
            yield f"found{number}", thing


def warn_of_length(loader: DataLoader[Any], batch: BatchConfig, steps: int) -> None:
    """``steps``: of one pass over what was prepared."""
    if loader in _asked and batch.micro_batches > 1:
        warnings.warn(
            f"len(loader) before ctx.prepare is {len(loader)} micro-batches, after it {steps} "
            f"steps, of {batch.micro_batches} micro-batches each: a schedule, or a total, counts "
            "steps; make it of the length after ctx.prepare",
            stacklevel=6,
        )
