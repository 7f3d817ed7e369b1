"""Whether gradients are what the agreement takes them for: sums over ranks, and not touched since.

Both are looked for by the numbers that torch counts in-place changes with, which costs no device
anything. It counts none of a DTensor's: of those a few elements are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NoReturn

import torch
from torch import nn

from elastic_ft.engines.modules import local_part
from elastic_ft.errors import ConfigError, UsageError

Versions = dict[nn.Parameter, tuple[int, int]]
PROBED_TENSORS, PROBED_ELEMENTS = 8, 64


def versions(parameters: Iterable[nn.Parameter]) -> Versions:
    """Of those with a gradient: which tensor that is, and how often it was changed."""
    return {p: _version(p.grad) for p in parameters if p.grad is not None}


def _version(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version + local_part(gradient)._version


def check_called(model: nn.Module, before: Versions) -> None:
    """Raises ConfigError if ``model``, which was not called with the last micro-batch, has other
    gradients than ``before`` the first: nothing has summed them over ranks."""
    if any(before.get(p) != found for p, found in versions(model.parameters()).items()):
        raise ConfigError(
            f"ctx.backward: {type(model).__name__} was not called with the step's last "
            "micro-batch, and has gradients: call the module itself, in each pass over the batch: "
            "its methods and parts, and what it made in the pass before, skip the reduction"
        )


def check_untouched(told: Versions) -> None:
    """Raises UsageError if gradients have changed since the last backward, other than to zero."""
    for parameter, found in versions(told).items():
        if found != told[parameter] and local_part(parameter.grad).count_nonzero():
            refuse_changed()


@torch.no_grad()
def probe(parameters: Iterable[nn.Parameter]) -> torch.Tensor | None:
    """Some elements of the largest gradients' parts here, as bytes: clipping changes them all."""
    known = [p.grad for p in parameters if p.grad is not None]
    parts = map(local_part, sorted(known, key=torch.Tensor.numel, reverse=True))  # as asked for
    largest = islice((part.reshape(-1) for part in parts if part.numel()), PROBED_TENSORS)
    some = [part[:: max(1, part.numel() // PROBED_ELEMENTS)].clone() for part in largest]
    return torch.cat([piece.view(torch.uint8) for piece in some]) if some else None


@torch.no_grad()
def has_changed(
    parameters: Iterable[nn.Parameter], before: torch.Tensor | None
) -> torch.Tensor | bool:
    """Whether gradients are not what ``probe`` has seen, nor zero: to be asked for."""
    if before is None or (found := probe(parameters)) is None:
        return False
    return is_other(found, before) & found.any()


def is_other(found: torch.Tensor, before: torch.Tensor) -> torch.Tensor | bool:
    """Of two probes: to be asked for, unless it is known."""
    return True if found.shape != before.shape else (found != before).any()


def refuse_cleared() -> NoReturn:
    raise ConfigError(
        "ctx.each: gradients of the step's earlier micro-batches were changed: clear them by "
        "optimizer.zero_grad(), and change them after ctx.clip_grad_norm_"
    )


def refuse_changed() -> NoReturn:
    raise UsageError(
        "optimizer.step: gradients were changed before they are means: use "
        "ctx.clip_grad_norm_ (with math.inf it clips nothing), and change them after it"
    )
