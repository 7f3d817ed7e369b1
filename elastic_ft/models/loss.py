"""The loss as a sum and a count, so that uneven micro-batches weigh what they should (I3)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Returns (float32 scalar sum of the losses, number of terms in it).

    ``model`` is always called, never one of its methods, so that hooks of DDP and FSDP run.

    Token batches, ``{"tokens": int64 [B, T+1]}``: the model maps int64 [B, T] to logits
    [B, T, V] (or to an object with ``.logits``), and the sum is next-token cross-entropy. An
    optional ``"labels"``, int64 [B, T+1], stands in for the tokens as targets; -100 leaves a
    target out. Labels line up with tokens and are shifted here, as in transformers.

    Any other batch: a dict is passed as keywords, a tuple or list as arguments, anything else as
    the one argument, and the model must return (sum of losses, count) itself. Raises TypeError
    if it does not.
    """
    if isinstance(batch, dict) and "tokens" in batch and batch.keys() <= {"tokens", "labels"}:
        return _next_token_loss(model, **batch)
    if isinstance(batch, dict):
        return _checked_pair(model(**batch))
    if isinstance(batch, tuple | list):
        return _checked_pair(model(*batch))
    return _checked_pair(model(batch))


def _next_token_loss(
    model: nn.Module, tokens: Tensor, labels: Tensor | None = None
) -> tuple[Tensor, int]:
    output = model(tokens[:, :-1])
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__} for a token batch; expected logits "
            "[batch, positions, vocabulary] or an object with .logits"
        )
    targets = (tokens if labels is None else labels)[:, 1:]
    total = cross_entropy_sum(logits, targets)
    if labels is None:
        return total, targets.numel()
    return total, int((targets != IGNORED_LABEL).sum())


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The float32 scalar sum over all targets but the ignored ones."""
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def _checked_pair(output: Any) -> tuple[Tensor, int]:
    if not (isinstance(output, tuple | list) and len(output) == 2):
        raise TypeError(
            f"the model returned {type(output).__name__}; expected a pair "
            "(scalar tensor: sum of losses, count of its terms)"
        )
    total, count = output
    if not (isinstance(total, Tensor) and total.ndim == 0):
        raise TypeError(f"expected a scalar tensor as the sum of losses, found {total!r}")
    return total.float(), int(count)
