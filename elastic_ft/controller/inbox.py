"""What the controller is told, in order: by its own threads, and by workers."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Any


class Inbox:
    """From any thread; one reads. What can wait lies there until the reader looks again."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        """Wakes the reader."""
        self._items.append(item)
        self._calls.put(None)

    def put_aside(self, item: Any) -> None:
        """Comes before whatever is put later; wakes nobody."""
        self._items.append(item)

    def take(self, timeout_s: float) -> list[Any]:
        """Waits to be called. Returns all that is there, perhaps nothing."""
        try:
            self._calls.get(timeout=timeout_s)
            for _ in range(self._calls.qsize()):
                self._calls.get_nowait()
        except queue.Empty:
            pass  # nobody called: what was put aside is looked at now
        return [self._items.popleft() for _ in range(len(self._items))]

    def get(self, timeout_s: float) -> Any:
        """Waits for one. Raises queue.Empty."""
        until_s = time.monotonic() + timeout_s
        while not self._items:  # a call may be of what was read before
            self._calls.get(timeout=max(0.0, until_s - time.monotonic()))
        return self._items.popleft()
