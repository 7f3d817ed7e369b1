"""What takes time in a store, for a thread that must not wait for one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Errands:
    """Does one thing after another, or ``at_a_time``; a thing that hangs for ever keeps no process
    alive, and one that raises is told of in the log alone."""

    def __init__(self, name: str, at_a_time: int = 1) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(at_a_time)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (errand := self._todo.get()) is not None:
            try:
                errand()
            except Exception:  # who needs to know catches it: here it would end all that come after
                log.exception("%s: an errand ended so", threading.current_thread().name)

    def submit(self, errand: Callable[[], None]) -> None:
        self._todo.put(errand)

    def drop(self) -> None:
        """What was not begun is not done."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._todo.get_nowait()

    def close(self, wait_s: float) -> bool:
        """Returns whether what was submitted is done, after ``wait_s`` at most; then it ends."""
        until_s = time.monotonic() + wait_s
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
