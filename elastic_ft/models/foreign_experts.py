"""Mixtures of transformers, whose experts are side by side in one module: shared out among ranks.

Such a module has weights [X, ...] alone, and is called with tokens, which experts were chosen for
each of them, and their weights. Mixtral and Qwen3-MoE have some, and others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.models.expert_exchange import ExpertShare, by_experts, local, of_nothing

TAKEN = ("hidden_states", "top_k_index", "top_k_weights")


def is_of_experts(module: nn.Module) -> bool:
    count, weights = getattr(module, "num_experts", None), [*module.parameters()]
    return (
        isinstance(count, int)
        and bool(weights)
        and all(weight.dim() == 3 and len(weight) == count for weight in weights)
        and tuple(inspect.signature(module.forward).parameters) == TAKEN
    )


def share_out(module: nn.Module, share: ExpertShare) -> None:
    """From now on its weights are this rank's experts', and tokens are sent to where theirs are."""
    experts = module.num_experts
    assert isinstance(experts, int)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def compute(x_ND: Tensor, counts_X: Tensor) -> Tensor:
            return share.compute(own, x_ND, counts_X)

        slots = share.slots(top_k_index)
        return by_experts(compute, hidden_states, slots, top_k_weights, experts)

    def own(x_ND: Tensor, counts_Y: Tensor) -> Tensor:
        weights = [local(weight) for weight in module.parameters()]
        if (found := of_nothing(x_ND, weights)) is not None:
            return found
        numbers = torch.arange(len(counts_Y), device=x_ND.device)
        expert_N1 = numbers.repeat_interleave(counts_Y, output_size=len(x_ND))[:, None]
        as_if_alone: Callable[..., Tensor] = type(module).forward
        return as_if_alone(_Own(module), x_ND, expert_N1, x_ND.new_ones(len(x_ND), 1))

    module.forward = forward


class _Own:
    """The module, as if this rank's experts were all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.num_experts = len(local(next(module.parameters())))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return local(found) if isinstance(found, Tensor) else found
