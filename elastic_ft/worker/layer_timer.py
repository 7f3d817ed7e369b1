"""How fast this rank computes, whatever it waits for: the evidence against a straggler.

Ranks wait for each other inside a step, so that all take as long. What one layer's forward takes
is a rank's own: FSDP has gathered its weights by then. With tensor parallelism layers wait for
peers, and nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class LayerTimer:
    """Times the forwards of some modules. They run on one stream, each after the other."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._handles: list[Any] = []
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter))
            self._handles.append(block.register_forward_hook(self._leave))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._began = self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
        self._began = None

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins: what ran since the last one (an evaluation) does not count."""
        self._spans = []

    def take(self) -> float:
        """Returns the mean seconds of a forward in this step; 0 if there was none."""
        spans, self._spans = self._spans, []
        if not spans:
            return 0.0
        if self._on_gpu:
            spans[-1][1].synchronize()
            return sum(begin.elapsed_time(end) for begin, end in spans) / len(spans) / 1e3
        return float(sum(end - begin for begin, end in spans)) / len(spans)

    def close(self) -> None:
        """The modules may outlive the generation (DDP): nothing of this stays on them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
