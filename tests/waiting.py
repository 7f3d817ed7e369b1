"""What tests do in place of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 150.0  # less than any tier gives a test; a busy machine takes long to import torch


def until(condition: Callable[[], T], what: str = "", within_s: float = DEADLINE_S) -> T:
    """The first true answer. AssertionError where there is none in time."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"waited {within_s:g} s for {what or condition}"
        pause.wait(0.05)
    return found
