"""How far a GPU has come with what is queued on it.

Python is ahead of its GPU, and in the end waits for it. Where one GPU never ends a kernel, the
others wait for it in collectives, and all ranks' threads wait for their own GPU at one place: what
tells them apart is how much of the step each GPU has still to compute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.faults import Points, unknown


class DeviceMarks:
    """Marks the end of each of some modules' forwards and backwards in the device's queue.

    How many a step has is what the step before had: the first one of a generation is not known, nor
    is any where there are no modules. ``points`` tells of them. Thread-safe.
    """

    def __init__(self, blocks: Sequence[nn.Module], points: Points) -> None:
        self._lock = threading.Lock()
        self._queued: deque[Any] = deque()  # events that the device has not passed yet, in order
        self._measured = self._expected = unknown()  # of the last whole step; of the running one
        self._marked = self._passed = 0  # in the running step
        self._handles = [block.register_forward_hook(self._forward) for block in blocks]
        self._points = points
        if blocks:
            points.layers_left = self.left

    def _forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._mark()
        found = output if isinstance(output, (tuple, list)) else (output,)
        for value in found:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._backward)  # goes with the tensor
                return

    def _backward(self, gradient: Tensor) -> None:
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._marked += 1
            self._queued.append(event)

    def begin(self) -> None:
        with self._lock:
            self._expected = self._measured
            self._marked = self._passed = 0
            self._queued.clear()

    def end(self) -> None:
        """It was made: what comes until the next one begins is no part of it."""
        with self._lock:
            self._measured, self._expected = self._marked, unknown()

    def left(self) -> int:
        """Marks of this step that the device has still to pass, or ``unknown()``."""
        with self._lock:
            while self._queued and _is_over(self._queued[0]):
                self._queued.popleft()
                self._passed += 1
            if self._expected == unknown():
                return unknown()
            return max(0, self._expected - self._passed)

    def close(self) -> None:
        """The modules may outlive the generation (DDP): nothing of this stays on them."""
        self._points.layers_left = unknown
        while self._handles:
            self._handles.pop().remove()


def _is_over(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device is lost: its calls say so, where they are made
        return False
