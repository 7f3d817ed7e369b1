"""Attention of transformers models over ranks that share positions: through its own interface.

A model asks by name for what computes attention. Here it is one that takes the layer's queries,
keys and values of this rank's positions, after rotation, and hands them to the rank's
``ContextShare``. Everything else in such a model is of one position, whose number it is told.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from elastic_ft.errors import ModelError
from elastic_ft.models.context_parallel import ContextShare

NAME = "elastic_ft_positions"  # in transformers' registry
# By ``model_type``. In others something beside attention may look at neighbours (convolutions,
# recurrences), or attention may be more than softmax of products; these are tested.
KNOWN_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2"),
    *("gemma3_text", "gpt_neox", "granite", "olmo2", "phi3", "smollm3"),
)


def why_not_shared(model: nn.Module) -> str | None:
    """Why ranks can't share positions of a model that is none of the built-in ones; None: they can.

    Nothing of what a model draws, see ``check_no_dropout``.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    of_transformers = type(model).__module__.startswith("transformers.")
    if not of_transformers or getattr(config, "model_type", None) not in KNOWN_TYPES:
        known = ", ".join(KNOWN_TYPES)
        return (
            "ranks share positions of the built-in decoders (model.preset), and of transformers "
            f"models of type {known}; found {kind}"
        )
    if not hasattr(model, "set_attn_implementation"):
        return "this version of transformers can't be told what computes attention; update it"
    if getattr(config, "output_router_logits", False):
        return (
            "model.transformers.output_router_logits: the routers' loss is of whole sequences, and "
            "ranks have some positions each; leave it out"
        )
    for name, module in model.named_modules():
        if kinds := sorted({*_rotations(module)} & {"dynamic", "longrope"}):
            return (
                f"{name}: rope_type {kinds[0]} turns by the length that a rank sees, and ranks see "
                "parts"
            )
    for name, module in _attentions(model):
        if not module.is_causal or getattr(config, "is_causal", True) is False:
            return f"{name} is not causal: padding at a sequence's end would be seen"
        if (cap := getattr(module, "attn_logit_softcapping", None)) is not None:
            return f"{name}: attn_logit_softcapping is {cap}, which no fast kernel has; null does"
    return None


def attend_over_ranks(model: nn.Module, context: ContextShare) -> None:
    """From now on ``model``, one that is shared (``why_not_shared``) or a part of it, takes this
    rank's positions, told their numbers as ``position_ids``, and ``documents`` if there are some
    (``ContextShare.inputs``): as any keyword, it comes to what computes attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention_over_ranks)
    copied: dict[int, Any] = {}  # others may have been made of the same configuration
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copied)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    for _, module in _attentions(model):
        module.context = context


def _attention_over_ranks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [B, H, t, E], [B, K, t, E]. Returns [B, t, H, E]; no weights."""
    if attention_mask is not None or dropout or softcap is not None:
        raise ModelError(
            f"parallel.cp: {type(module).__name__} asks for a mask, dropout or capped scores, "
            "which ranks that share positions have not"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return module.context.attend(q, k, v, scaling, sliding_window, documents), None


def _attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that compute attention, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            yield name, module


def _rotations(module: nn.Module) -> list[str]:
    """By which rules it turns, of each kind of layer if they differ."""
    found: Any = getattr(module, "rope_type", None)
    return [*found.values()] if isinstance(found, dict) else [str(found)]
