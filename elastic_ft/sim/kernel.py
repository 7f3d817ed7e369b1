"""What every part of a simulated world takes: a clock, chance, the time that messages take."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Protocol

from elastic_ft.sim.scenario import SimScenario

DUPLICATE_LATE_MAX_S = 30.0


class Clock(Protocol):
    """The parts of a world say in protocols like this one what they need of it: no more."""

    now_s: float
    rng: random.Random

    def after(self, after_s: float, act: Callable[[], None]) -> None: ...


class Kernel:
    """Attributes:
    trace: set to a list to collect the history in words.
    """

    def __init__(self, scenario: SimScenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"world {scenario.seed}")
        self.now_s = 0.0
        self.latency_s = scenario.latency_s
        self.duplicates = scenario.duplicates
        self.trace: list[str] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def after(self, after_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + after_s, act)

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, act))

    def turn(self) -> bool:
        """Lets the next thing happen. Returns False if nothing ever will."""
        if not self._queue:
            return False
        self.now_s, _, act = heapq.heappop(self._queue)
        act()
        return True

    def digest(self) -> str:
        return self._digest.hexdigest()

    def note(self, what: str) -> None:
        """Into the trace, whose hash tells one history from another."""
        line = f"{self.now_s:.4f} {what}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def latency(self) -> float:
        return self.rng.uniform(0.001, self.latency_s)

    def twice_after_s(self) -> float:
        """A message that arrives again is late by a generation, sometimes by several."""
        return self.rng.uniform(0, self.rng.choice((3.0, DUPLICATE_LATE_MAX_S)))
