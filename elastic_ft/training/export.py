"""Whole weights as files that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_ft.errors import UsageError


def write_weights(model: nn.Module, whole: dict[str, torch.Tensor], folder: str | Path) -> None:
    """As safetensors, by ``save_pretrained`` where the model has it. Raises UsageError."""
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(folder, state_dict=whole)
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UsageError("ctx.export: needs safetensors: pip install safetensors") from None
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in whole.items()}, Path(folder) / "model.safetensors")
