"""Cross-entropy of a long sequence and a large vocabulary, without its logits in memory.

Logits are made some positions at a time, and of each part the gradients at once, while it is
there: of T x V logits, none but a part's are ever kept. It computes what ``loss.cross_entropy_sum``
does: three matrix products a logit, none twice.

Shape suffixes as in ``decoder``; N is B x T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from elastic_ft.models.loss import IGNORED_LABEL


class Vocabulary(NamedTuple):
    """The rows of the projection that this rank has, of those that ``group`` shares."""

    first: int = 0
    group: dist.ProcessGroup | None = None


def chunked_cross_entropy_sum(
    x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, chunk_tokens: int
) -> Tensor:
    """The float32 scalar sum over all targets but the ignored ones, of logits x @ weight^T.

    ``weight`` may be a DTensor cut by rows over a mesh of one dimension, ``x`` then one that is cut
    by positions, or whole: the sum is the same on every rank.
    """
    vocabulary = Vocabulary()
    if isinstance(weight_VD, DTensor):
        mesh, rows = weight_VD.device_mesh, weight_VD.shape[0]
        per_rank = -(-rows // mesh.size())
        vocabulary = Vocabulary(min(per_rank * mesh.get_local_rank(), rows), mesh.get_group())
        weight_VD = weight_VD.to_local()
    if isinstance(x_BTD, DTensor):  # each rank's rows make a part of the gradient's sum
        x_BTD = x_BTD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    kind = x_BTD.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_BTD, weight_VD = x_BTD.to(dtype), weight_VD.to(dtype)
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    differentiated = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    with torch.autocast(kind, enabled=False):
        total: Tensor = _Chunked.apply(
            x_ND, weight_VD, targets_N, chunk_tokens, vocabulary, differentiated
        )
        return total


class _Chunked(torch.autograd.Function):
    """Gradients are made in forward, of a loss that counts once, and scaled in backward.

    That of the weight adds up in float32, whatever is computed in.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk_tokens: int,
        vocabulary: Vocabulary,
        differentiated: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x_ND.device)
        dx_ND, dweight_VD = None, None
        if differentiated:
            dx_ND = torch.empty_like(x_ND)
            dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(x_ND), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_CV = (x_ND[part] @ weight_VD.t()).float()
            total += _loss_and_gradient(logits_CV, targets_N[part], vocabulary).double()
            if dx_ND is not None and dweight_VD is not None:
                dlogits_CV = logits_CV.to(x_ND.dtype)
                dx_ND[part] = dlogits_CV @ weight_VD
                if x_ND.dtype is torch.float32:
                    dweight_VD.addmm_(dlogits_CV.t(), x_ND[part])
                else:
                    dweight_VD += dlogits_CV.t() @ x_ND[part]
        ctx.gradients, ctx.dtype = (dx_ND, dweight_VD), weight_VD.dtype
        return total.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dx_ND, dweight_VD), ctx.gradients = ctx.gradients, (None, None)
        if dx_ND is None:
            raise RuntimeError("a chunked loss is differentiated once")
        factor = gradients[0]  # in place: each of the two may be the largest tensor there is
        dx_ND.mul_(factor.to(dx_ND.dtype))
        return dx_ND, dweight_VD.mul_(factor).to(ctx.dtype), None, None, None, None


def _loss_and_gradient(logits_CV: Tensor, targets_C: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The loss's sum over a part. Leaves its gradient in place of the float32 logits.

    Over a group three numbers a row go between ranks: Shoeybi et al., 2019, section 3.
    """
    group = vocabulary.group
    most_C = logits_CV.amax(dim=-1)
    if group is not None:
        dist.all_reduce(most_C, dist.ReduceOp.MAX, group)
    logits_CV.sub_(most_C[:, None])
    counts_C = targets_C != IGNORED_LABEL
    here_C = targets_C - vocabulary.first
    is_here_C = (here_C >= 0) & (here_C < logits_CV.shape[1]) & counts_C
    index_C1 = here_C.clamp(0, logits_CV.shape[1] - 1)[:, None]
    own_C = logits_CV.gather(1, index_C1).squeeze(1) * is_here_C
    sums_2C = torch.stack([logits_CV.exp_().sum(dim=-1), own_C])
    if group is not None:
        dist.all_reduce(sums_2C, group=group)
    logits_CV.mul_((counts_C / sums_2C[0])[:, None])
    logits_CV.scatter_add_(1, index_C1, -is_here_C.to(logits_CV.dtype)[:, None])
    return ((sums_2C[0].log() - sums_2C[1]) * counts_C).sum()
