"""A pipeline stage of a mixture of experts.

The routers' loss of its layers does not go from stage to stage: its gradient enters the backward of
what the stage hands on, and its sum is added to the job's loss where it arose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elastic_ft.models.decoder import DecoderStage
from elastic_ft.models.experts import MixtureDecoder


class MixtureStage(DecoderStage):
    """As ``DecoderStage``, of a ``MixtureDecoder``.

    Attributes:
        factor: times which the loss is differentiated.
        router_sum: float64, of what has been run in training since it was set to zero.
    """

    def __init__(self, whole: MixtureDecoder, layers: range) -> None:
        super().__init__(whole, layers)
        self.factor, self.router_sum = 1.0, torch.zeros((), dtype=torch.float64)

    def through_layers(
        self, x: Tensor, turns: Tensor, attends: Tensor | None, **more: Any
    ) -> Tensor:
        """``more``: ``attention_mask`` [B, T]; ``counted`` [B, T], zero for what is padding to the
        pipeline."""
        valid_BT, mask, sums = more["counted"], more.get("attention_mask"), []
        if mask is not None:
            valid_BT = valid_BT * mask.to(valid_BT.dtype)
        for layer in self.layers.values():
            x, router_sum = layer(x, turns, attends=attends, valid_BT=valid_BT)
            sums.append(router_sum)
        if not self.training:
            return x
        total = torch.stack(sums).sum()
        self.router_sum = self.router_sum.to(total.device) + total.detach().double()
        with_loss: Tensor = _WithLoss.apply(x, total, self.factor)
        return with_loss


def mixture_stage_costs(model: MixtureDecoder) -> list[int]:
    """As ``Decoder.stage_costs``; of experts, those that a token goes through."""
    config = model.config
    idle = (config.n_experts - config.experts_per_token) * 3 * config.dim * config.expert_ffn_dim
    costs = [sum(p.numel() for p in layer.parameters()) - idle for layer in model.layers]
    costs[-1] += config.vocab_size * config.dim
    return costs


class _WithLoss(torch.autograd.Function):
    """Its first argument; the second one has a gradient of ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.like = factor, loss.detach()
        return x.clone()  # the zero-bubble schedule takes no views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.factor), None
