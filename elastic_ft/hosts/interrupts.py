"""Ctrl-C, where a controller runs that it is to stop in good order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Each interrupt calls ``stop``, which obeys the second at once; the third is raised, as all
    may be stuck. Signals can be caught in the main thread alone: in another, nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def on_interrupt(signum: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
