"""Adapters in a model (LoRA), put there by peft: the rest of the model is frozen.

A frozen weight keeps its name, but for ``base_layer`` in it where an adapter has been put around
its layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.config import LoraSection
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ModelError, one_line
from elastic_ft.models.initial import draw

KEY = "model.lora"
ADAPTER = "default"  # peft's name of the only one
IN, OUT = f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
MARK, WRAPPED = ".lora_", ".base_layer."
BUNDLE = "base_model.model."  # what peft's files have before a model's names


def add_adapters(model: nn.Module, lora: LoraSection) -> nn.Module:
    """``model``, changed in place: adapters in the layers that ``lora`` names, all else frozen.

    Raises ModelError, one line.
    """
    peft = _peft()
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    if buffers:
        raise ModelError(
            f"{KEY}: {min(buffers)} changes in training and is no weight: train it all"
        )
    try:
        adapted = peft.inject_adapter_in_model(peft.LoraConfig(**_settings(lora)), model)
    except Exception as error:  # peft raises errors of many kinds
        raise ModelError(f"{KEY}: {one_line(error)}") from error
    odd = [n for n, p in adapted.named_parameters() if p.requires_grad != is_adapter(n)]
    odd += [n for n, _ in adapted.named_parameters() if MARK in n and IN not in n and OUT not in n]
    if odd:
        raise ModelError(f"{KEY}: {odd[0]}: adapters of linear layers alone are trained here")
    adapted.initial_part = initial_part  # type: ignore[assignment]
    return adapted


def is_adapter(name: str) -> bool:
    return IN in name or OUT in name


def name_in_base(name: str) -> str:
    """Of a frozen weight, in the model without adapters."""
    return name.replace(WRAPPED, ".")


def initial_part(name: str, shape: Sequence[int], seed: int, box: Box) -> Tensor:
    """As peft begins: what goes in is drawn uniformly (He et al. with a = sqrt(5)), what comes out
    is zero, so that a model begins as its base."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))

    def fill(values: Tensor, generator: torch.Generator) -> object:
        if OUT in name:
            return values.zero_()
        return values.uniform_(-bound, bound, generator=generator)

    return draw(seed, name, shape, box, fill, torch.float32)


def files_of(lora: LoraSection, base: str, names: Sequence[str]) -> tuple[bytes, Mapping[str, str]]:
    """What peft loads an adapter from: adapter_config.json, and by the model's names those that
    adapter_model.safetensors has. ``base``: where the model is. Raises ModelError."""
    config: dict[str, Any] = _peft().LoraConfig(**_settings(lora)).to_dict()
    layers = {name.partition(MARK)[0] for name in names}
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    if not (isinstance(lora.targets, tuple) and lora.targets):
        config["target_modules"] = sorted(layers)  # as peft has chosen them
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    return text.encode(), {n: BUNDLE + n.replace(f".{ADAPTER}.", ".") for n in names}


def _settings(lora: LoraSection) -> dict[str, Any]:
    targets: Any = [*lora.targets] if isinstance(lora.targets, tuple) else lora.targets
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"{KEY}: needs peft: pip install 'elastic-ft[huggingface]' ({one_line(error)})"
        ) from error
    return peft
