"""The loss as a sum and a count, so that uneven micro-batches weigh what they should (I3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic_ft.errors import ModelError
from elastic_ft.models import named

Loss = tuple[Tensor, Tensor | int, dict[str, named.Pair]]
IGNORED_LABEL = -100
TOKEN_KEYS = {"tokens", "labels", "attention_mask", "position_ids"}


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
    """Returns (float32 scalar sum of the losses, number of terms in it): see ``loss_and_named``."""
    loss, count, _ = loss_and_named(model, batch)
    return loss, count


def loss_and_named(model: nn.Module, batch: Any) -> Loss:
    """Returns (float32 scalar sum of the losses, number of terms in it, named metrics).

    What is counted on the device stays there: to ask for it would be to wait for all before it.

    ``model`` is always called, never one of its methods, so that hooks of DDP and FSDP run.

    Token batches, ``{"tokens": int64 [B, T+1]}``: the model maps int64 [B, T] to logits
    [B, T, V] (or to an object with ``.logits``), and the sum is next-token cross-entropy. An
    optional ``"labels"``, int64 [B, T+1], stands in for the tokens as targets; -100 leaves a
    target out. Labels line up with tokens and are shifted here, as in transformers. Of the same
    shape, ``"attention_mask"`` (0: padding, no target either unless labels say so) and
    ``"position_ids"`` go to the model. A transformers model takes ``"input_ids"`` for tokens. In
    training, a mixture of experts adds its routers' loss, times the count. A decoder whose
    ``loss_chunk_tokens`` is set is given the targets, and returns the sum itself. Where ranks
    share positions (``context``) sum and number are of this rank's.

    Any other batch: a dict is passed as keywords, a tuple or list as arguments, anything else as
    the one argument, and the model must return (sum of losses, count) itself, or these and
    {name: (sum, count)} of other metrics. Raises ModelError if it does not.
    """
    if isinstance(batch, dict) and _is_of_transformers(model):
        batch = with_tokens(batch)
    if isinstance(batch, dict) and "tokens" in batch and batch.keys() <= TOKEN_KEYS:
        return (*_next_token_loss(model, **batch), {})
    if isinstance(batch, dict):
        return _checked(model(**batch))
    if isinstance(batch, tuple | list):
        return _checked(model(*batch))
    return _checked(model(batch))


def _is_of_transformers(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(_bare(model)).__mro__)


def _bare(model: nn.Module) -> nn.Module:
    """Without what DDP or DeepSpeed puts around it."""
    return getattr(model, "module", model)


def with_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of a transformers model, its tokens by our name."""
    return {"tokens" if key == "input_ids" else key: value for key, value in batch.items()}


def shifted(
    tokens: Tensor, labels: Tensor | None = None, **more: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of a token batch: inputs and targets [B, T], and what else goes to the model."""
    inputs = {key: value[:, :-1] for key, value in more.items()}
    if labels is None and "attention_mask" in more:
        labels = tokens.masked_fill(more["attention_mask"] == 0, IGNORED_LABEL)
    return tokens[:, :-1], (tokens if labels is None else labels)[:, 1:], inputs


def lengthened(
    tokens: Tensor, targets: Tensor, inputs: Mapping[str, Tensor], length: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What ``shifted`` returned, of ``length`` positions. Those that are added have no targets, and
    are at the end, where what is causal does not see them."""
    missing = length - tokens.shape[1]
    longer = {key: F.pad(of, (0, missing)) for key, of in inputs.items()}
    return F.pad(tokens, (0, missing)), F.pad(targets, (0, missing), value=IGNORED_LABEL), longer


def _next_token_loss(model: nn.Module, **batch: Tensor) -> tuple[Tensor, Tensor | int]:
    tokens, targets, inputs = shifted(**batch)
    context, multiple = (getattr(_bare(model), key, None) for key in ("context", "length_multiple"))
    if missing := -tokens.shape[1] % (multiple or 1) if context is None else 0:
        length = tokens.shape[1] + missing
        tokens, targets, inputs = lengthened(tokens, targets, inputs, length)
    if context is not None:  # after the shift: each rank has the targets of its own positions
        there = torch.ones_like(tokens)
        inputs = context.inputs(inputs, tokens, _is_of_transformers(model))
        tokens, targets = context.cut(tokens), context.cut(targets, IGNORED_LABEL)
        if hasattr(_bare(model), "counts_tokens"):  # models.experts
            inputs["attention_mask"] = context.cut(there)
    is_counted = bool(batch.keys() & {"labels", "attention_mask"} or missing) or context is not None
    count = (targets != IGNORED_LABEL).sum() if is_counted else targets.numel()
    if getattr(_bare(model), "loss_chunk_tokens", None):
        return model(tokens, targets=targets, **inputs), count
    output = model(tokens, **inputs)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__} for a token batch; expected logits "
            "[batch, positions, vocabulary] or an object with .logits"
        )
    total = cross_entropy_sum(logits, targets)
    router = router_loss(model, output)
    if (routers := getattr(output, "router_sum", None)) is not None:  # models.experts
        total = total + routers
    return (total, count) if router is None else (total + router * count, count)


def router_loss(model: nn.Module, output: Any) -> Tensor | None:
    """What a transformers mixture of experts adds to the mean loss, so that its experts share the
    tokens (``output_router_logits: true``); None in evaluation.

    Raises ModelError if the model does not say by which coefficient.
    """
    found = getattr(output, "aux_loss", None)
    if not isinstance(found, Tensor) or not model.training:
        return None
    bare = _bare(model)
    coefficient = getattr(getattr(bare, "config", None), "router_aux_loss_coef", None)
    if coefficient is None:
        raise ModelError(
            f"{type(bare).__name__} returned an aux_loss, and has no config.router_aux_loss_coef "
            "that says how much it counts"
        )
    return coefficient * found.float()


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The float32 scalar sum over all targets but the ignored ones.

    Of a DTensor, logits whose vocabulary is cut over a mesh of one dimension: nothing of their size
    is gathered, and the sum is the same on every rank.
    """
    if isinstance(logits_BTV, DTensor):
        local, mesh = logits_BTV.to_local(), logits_BTV.device_mesh
        per_rank = -(-logits_BTV.shape[-1] // mesh.size())
        first = min(per_rank * mesh.get_local_rank(), logits_BTV.shape[-1])
        rows, targets = local.flatten(0, 1), targets_BT.flatten()
        return _VocabularyParallel.apply(rows, targets, first, mesh.get_group())
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1),
        targets_BT.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


class _VocabularyParallel(torch.autograd.Function):
    """Cross-entropy of logits [N, V / ranks]: three numbers per row go between ranks.

    Shoeybi et al., 2019, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dtype, logits_NV = logits_NV.dtype, logits_NV.float()
        most_N = logits_NV.amax(dim=-1)
        dist.all_reduce(most_N, dist.ReduceOp.MAX, group)
        shifted_NV = logits_NV - most_N[:, None]
        is_here_N = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        index_N = (targets_N - first).clamp(0, logits_NV.shape[1] - 1)
        own_N = shifted_NV.gather(1, index_N[:, None]).squeeze(1) * is_here_N
        exps_NV = shifted_NV.exp_()
        sums_2N = torch.stack([exps_NV.sum(dim=-1), own_N])
        dist.all_reduce(sums_2N, group=group)
        counts_N = targets_N != IGNORED_LABEL
        ctx.save_for_backward(exps_NV.div_(sums_2N[0, :, None]), index_N, is_here_N, counts_N)
        return ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_NV, index_N, is_here_N, counts_N = ctx.saved_tensors
        softmax_NV = softmax_NV * counts_N[:, None]
        wanted_N = (is_here_N & counts_N).to(softmax_NV.dtype)
        softmax_NV.scatter_add_(1, index_N[:, None], -wanted_N[:, None])
        return (softmax_NV * gradients[0]).to(ctx.dtype), None, None, None


def _checked(output: Any) -> Loss:
    if not (isinstance(output, tuple | list) and len(output) in (2, 3)):
        found = f"{len(output)} values" if isinstance(output, tuple | list) else _kind(output)
        raise ModelError(
            f"the model returned {found}; expected (sum of losses: a scalar tensor, count of its "
            "terms), and {name: (sum, count)} of other metrics if there are any"
        )
    total, count, *rest = output
    if not (isinstance(total, Tensor) and total.ndim == 0):
        raise ModelError(
            f"the model returned {_kind(total)} as the sum of losses, expected a scalar tensor: "
            "the sum over its terms, not their mean"
        )
    if isinstance(count, Tensor):
        count = count.detach()
    else:
        try:
            count = int(count)
        except (TypeError, ValueError):
            raise ModelError(
                f"the model returned {_kind(count)} as the count of its loss's terms, expected a "
                "whole number or a scalar tensor"
            ) from None
    return total.float(), count, named.checked(rest[0]) if rest else {}


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return (
        f"{value!r}"
        if value is None or isinstance(value, int | float | str)
        else type(value).__name__
    )
