"""Models that take longer: on the processes that a file names; in evaluation, and to digest."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.state import digest

SLOW_S = 0.15  # a layer's forward: far more than a busy machine makes of it


class SlowBlock(nn.Module):
    def __init__(self, inner: nn.Module, victims: Path) -> None:
        super().__init__()
        self.inner, self._victims = inner, victims

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        if self._victims.exists() and str(os.getpid()) in self._victims.read_text().split():
            threading.Event().wait(SLOW_S)
        output: Tensor = self.inner(*inputs, **more)
        return output


def slowed(victims: str) -> nn.Module:
    model = Decoder(DecoderConfig(300, 2, 32, 2, 1, 64, 16))
    model.layers = nn.ModuleList(SlowBlock(layer, Path(victims)) for layer in model.layers)
    return model


class SlowToEvaluate(nn.Module):
    def __init__(self, inner: nn.Module, wait_s: float) -> None:
        super().__init__()
        self.inner, self._wait_s = inner, wait_s

    def forward(self, *tokens: Tensor) -> Tensor:
        if not self.training:
            threading.Event().wait(self._wait_s)
        output: Tensor = self.inner(*tokens)
        return output


def slow_at_the_end(evaluate_s: float, digest_s: float) -> nn.Module:
    """A batch of the evaluation takes ``evaluate_s`` here, a tensor of the digest ``digest_s``."""

    def slowly(*args: Any) -> Any:
        threading.Event().wait(digest_s)
        return real(*args)

    real = getattr(digest.digest_sums, "real", digest.digest_sums)
    slowly.real = real  # type: ignore[attr-defined]
    digest.digest_sums = slowly
    return SlowToEvaluate(Decoder(DecoderConfig(300, 2, 32, 2, 1, 64, 16)), evaluate_s)
