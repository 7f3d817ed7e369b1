"""A model whose layers take longer on the processes that a file names."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torch import Tensor, nn

from elastic_ft.models.decoder import Decoder, DecoderConfig

SLOW_S = 0.15  # a layer's forward: far more than a busy machine makes of it


class SlowBlock(nn.Module):
    def __init__(self, inner: nn.Module, victims: Path) -> None:
        super().__init__()
        self.inner, self._victims = inner, victims

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        if self._victims.exists() and str(os.getpid()) in self._victims.read_text().split():
            threading.Event().wait(SLOW_S)
        output: Tensor = self.inner(x, *rotary)
        return output


def slowed(victims: str) -> nn.Module:
    model = Decoder(DecoderConfig(300, 2, 32, 2, 1, 64, 16))
    model.layers = nn.ModuleList(SlowBlock(layer, Path(victims)) for layer in model.layers)
    return model
