"""Whole weights as files that others read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from elastic_ft.errors import UsageError


class Together(Protocol):
    """What of a loop's context an export needs."""

    rank: int

    def whole_state(self, model: nn.Module) -> dict[str, torch.Tensor]: ...
    def together(self, function: Callable[[Callable[[], None]], Any]) -> Any: ...
    def sum(self, *values: float) -> list[float]: ...


def export(context: Together, model: nn.Module, folder: str | Path) -> None:
    """One errand of all ranks: it is over for none before the files are written, and is made again
    where the world breaks under it. Raises UsageError."""

    def run(progress: Callable[[], None]) -> None:
        whole = context.whole_state(model)
        if context.rank == 0:
            write_weights(model, whole, folder)
        progress()
        context.sum(0.0)

    context.together(run)


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
    path = Path(folder) / "model.safetensors"
    unfinished = path.with_name(".model.safetensors")
    save_file({n: t.contiguous() for n, t in whole.items()}, unfinished)
    unfinished.replace(path)
