"""Where a step's time goes, as far as its thread waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Spent:
    """What the training thread waited for since the last step was reported, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return {name: round(seconds, 6) for name, seconds in taken.items()}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
