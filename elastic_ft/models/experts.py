"""A decoder whose feed-forwards are mixtures of experts: a router sends each token to some of them.

As in DeepSeek-V3 (2024, section 2.1.2): scores are sigmoids, computed in float32; the experts with
the highest scores plus bias are taken, and what they return is weighed by their scores without it.
After each step the bias of an expert that had more tokens than the mean goes down by a constant, of
one that had fewer up. Every token is computed, however many an expert is sent.

What balances must not depend on who computes which samples. So the loss of a router is that of each
sequence by itself, and tokens are counted over the global batch: whole numbers, whose sum is the
same in every world, decide on a step's bias. The bias is a buffer, and state like any other.

Shape suffixes: as in ``models.decoder``; N tokens of a micro-batch, X experts, S of them a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.decoder import (
    AnyDecoder,
    Attention,
    DecoderConfig,
    FeedForward,
    turns_and_attends,
)
from elastic_ft.models.expert_exchange import ExpertShare, by_experts, local, of_nothing
from elastic_ft.torch_private import in_backward


@dataclass(frozen=True)
class MixtureConfig(DecoderConfig):
    """``ffn_dim`` is that of the expert that all tokens go to.

    Attributes:
        router_loss: its coefficient, beside the mean loss of a token.
        bias_rate: by how much a step changes a bias.
    """

    n_experts: int = 8
    experts_per_token: int = 2
    expert_ffn_dim: int = 128
    router_loss: float = 1e-4
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.n_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than n_experts "
                f"{self.n_experts}"
            )


MIXTURES: dict[str, MixtureConfig] = {
    # vocab_size, n_layers, dim, n_heads, n_kv_heads, ffn_dim, max_sequence_length, rope_theta,
    # norm_eps, tie_embeddings, n_experts, experts_per_token, expert_ffn_dim
    "decoder-moe-4m": MixtureConfig(
        4096, 6, 128, 4, 2, 256, 1024, 10_000.0, 1e-5, False, 8, 2, 128
    ),
    # DeepSeekMoE 16B (Dai et al., 2024), whose first layer alone is dense.
    "decoder-moe-16b": MixtureConfig(
        102_400, 28, 2048, 16, 16, 2816, 4096, 10_000.0, 1e-6, False, 64, 6, 1408
    ),
}


class MixtureOutput(NamedTuple):
    """Attributes:
    logits: [B, T, V].
    router_sum: what the routers add to the sum of a token's losses; a scalar.
    """

    logits: Tensor
    router_sum: Tensor


def is_grouped(x_ND: Tensor, weight_XDF: Tensor) -> bool:
    """Whether all experts' products are one kernel's: of GPUs, for bfloat16 whose rows begin at
    multiples of 16 bytes."""
    fits = weight_XDF.shape[1] % 8 == weight_XDF.shape[2] % 8 == 0
    return x_ND.is_cuda and x_ND.dtype == weight_XDF.dtype == torch.bfloat16 and fits


@cache
def spoils_empty_groups(device: torch.device) -> bool:
    """Whether a grouped product's gradient for a weight that had no rows is any numbers: on
    Blackwell (pytorch#172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def without_spoils(weight_XDF: Tensor, counts_X: Tensor) -> Tensor:
    """The same, with gradients of zero for experts without rows."""
    if not weight_XDF.requires_grad:
        return weight_XDF
    found, used = weight_XDF.view_as(weight_XDF), (counts_X > 0)[:, None, None]
    found.register_hook(lambda gradient: torch.where(used, gradient, 0.0))  # NaN, too
    return found


class Experts(nn.Module):
    """SwiGLUs side by side: weights [X, in, out]."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        inner = (config.n_experts, config.dim, config.expert_ffn_dim)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(config.n_experts, config.expert_ffn_dim, config.dim))

    def forward(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        """``x``: of each token one row for each expert that it goes to, in the experts' order.

        Where ranks share experts out, of those that this one has; there may be none.
        """
        gate, up, down = map(local, (self.gate, self.up, self.down))
        if (found := of_nothing(x_ND, (gate, up, down))) is not None:
            return found
        kind = x_ND.device.type
        if torch.is_autocast_enabled(kind):  # which knows nothing of grouped products
            dtype = torch.get_autocast_dtype(kind)
            x_ND, gate, up, down = (x.to(dtype) for x in (x_ND, gate, up, down))
        if is_grouped(x_ND, gate):
            if spoils_empty_groups(x_ND.device):
                gate, up, down = (without_spoils(w, counts_X) for w in (gate, up, down))
            ends_X = counts_X.cumsum(0).to(torch.int32)
            inner = F.silu(F.grouped_mm(x_ND, gate, offs=ends_X))
            inner = inner * F.grouped_mm(x_ND, up, offs=ends_X)
            return F.grouped_mm(inner, down, offs=ends_X)
        rows = zip(x_ND.split(counts_X.tolist()), gate, up, down, strict=True)
        return torch.cat([(F.silu(x @ g) * (x @ u)) @ d for x, g, u, d in rows])


class MixtureOfExperts(nn.Module):
    """In the place of a feed-forward.

    Attributes:
        counts: whether tokens of the next forward are counted: not those of padding.
        load: int64 [X], tokens that each expert was sent since ``forget``; None: none yet.
        share: where ranks share the experts out.
        context: where ranks share positions.
    """

    bias: Tensor
    load: Tensor | None
    share: ExpertShare | None = None
    context: ContextShare | None = None

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.n_experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config)
        self.register_buffer("bias", torch.zeros(config.n_experts))
        self.counts, self.load = True, None

    def forget(self) -> None:
        self.load = None

    def forward(self, x_BTD: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the same shape, and the router's loss summed over tokens: a scalar."""
        experts, per_token = self.config.n_experts, self.config.experts_per_token
        flat_ND = x_BTD.flatten(0, 1)
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NX = F.linear(flat_ND.float(), self.router.weight.float()).sigmoid()
        chosen_NS = (scores_NX.detach() + self.bias.float()).topk(per_token, dim=-1).indices
        weights_NS = scores_NX.gather(1, chosen_NS)
        weights_NS = weights_NS / weights_NS.sum(dim=-1, keepdim=True)
        slots_NS = chosen_NS if self.share is None else self.share.slots(chosen_NS)
        mixed_ND = by_experts(self._compute, flat_ND, slots_NS, weights_NS, experts)
        out_BTD = mixed_ND.view_as(x_BTD) + self.shared(x_BTD)
        taken_BTX = F.one_hot(chosen_NS, experts).sum(dim=1).unflatten(0, x_BTD.shape[:2])
        if valid_BT is None:
            valid_BT = torch.ones(x_BTD.shape[:2], dtype=torch.int64, device=x_BTD.device)
        taken_BTX = taken_BTX * valid_BT[..., None].long()
        if self.training and self.counts and not in_backward():  # not what is computed again
            counted_X = taken_BTX.sum(dim=(0, 1))
            self.load = counted_X if self.load is None else self.load + counted_X
        return out_BTD, self._loss_sum(scores_NX.view(taken_BTX.shape), taken_BTX, valid_BT)

    def _compute(self, x_ND: Tensor, counts_X: Tensor) -> Tensor:
        if self.share is None:
            computed: Tensor = self.experts(x_ND, counts_X)
            return computed
        return self.share.compute(self.experts, x_ND, counts_X)

    def _loss_sum(self, scores_BTX: Tensor, taken_BTX: Tensor, valid_BT: Tensor) -> Tensor:
        """Sequence-wise (equations 17 to 20), times the tokens of each sequence."""
        taken_BX, tokens_B = taken_BTX.sum(dim=1), valid_BT.long().sum(dim=1)
        if self.context is not None and self.training:  # of sequences, not of this rank's positions
            counts_BX1 = self.context.whole(torch.cat([taken_BX, tokens_B[:, None]], dim=1))
            taken_BX, tokens_B = counts_BX1[:, :-1], counts_BX1[:, -1]
        tokens_B = tokens_B.clamp(min=1).float()
        shares = scores_BTX / scores_BTX.sum(dim=-1, keepdim=True)
        share_BX = (shares * valid_BT[..., None]).sum(dim=1) / tokens_B[:, None]
        even = self.config.n_experts / self.config.experts_per_token
        often_BX = taken_BX.float() * even / tokens_B[:, None]
        return self.config.router_loss * ((often_BX * share_BX).sum(dim=1) * tokens_B).sum()

    @torch.no_grad()
    def balance(self, load_X: Tensor) -> None:
        """``load``: of the global batch, in float64."""
        self.bias += self.config.bias_rate * (load_X.mean() - load_X).sign().to(self.bias.dtype)


class MixtureBlock(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = MixtureOfExperts(config)

    def forward(
        self,
        x_BTD: Tensor,
        turns: Tensor,
        attends: Tensor | None = None,
        valid_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_BTD, normed_BTD = self.attended(x_BTD, turns, attends)
        mixed_BTD, router_sum = self.ffn(normed_BTD, valid_BT)
        return x_BTD + mixed_BTD, router_sum

    def attended(
        self, x_BTD: Tensor, turns: Tensor, attends: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All but the mixture, of which sizes depend on what routers choose. Returns what passes it
        by, and what goes into it."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turns, attends=attends)
        return x_BTD, self.ffn_norm(x_BTD)


class MixtureDecoder(AnyDecoder):
    """As ``Decoder``, of ``MixtureBlock``s. Returns ``MixtureOutput`` in training, else logits.

    Attributes:
        counts_tokens: all but those that ``attention_mask`` leaves out.
    """

    layer = MixtureBlock
    counts_tokens = True

    def forward(
        self,
        tokens_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | MixtureOutput:
        """Arguments as of ``Decoder.forward``. Raises ValueError."""
        length, given = self.check_length(tokens_BT), (position_ids, attention_mask, documents)
        turns, attends = turns_and_attends(self.config, tokens_BT, length, self.context, *given)
        x_BTD, sums = self.embedding(tokens_BT), []
        for layer in self.layers:
            x_BTD, router_sum = layer(x_BTD, turns, attends=attends, valid_BT=attention_mask)
            sums.append(router_sum)
        logits_BTV = self.output(self.norm(x_BTD))
        if not self.training:
            return logits_BTV
        return MixtureOutput(logits_BTV, torch.stack(sums).sum())
