"""The core's timers: when each is due, on the monotonic clock. Of one thread."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev


class Timers:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, ev.TimerFired]] = []
        self._count = 0  # in the order in which they were started, of those due at one time

    def start(self, command: cmd.StartTimer) -> None:
        self._count += 1
        fired = ev.TimerFired(0.0, command.timer, command.generation)
        heapq.heappush(self._due, (time.monotonic() + command.after_s, self._count, fired))

    def pending(self) -> list[tuple[float, str, int]]:
        """Of each: when it is due (unix), its name, its generation."""
        now_s = time.time() - time.monotonic()
        return [(round(now_s + due_s, 6), t.timer, t.generation) for due_s, _, t in self._due]

    @property
    def next_s(self) -> float | None:
        """When the next one is due; None if none runs."""
        return self._due[0][0] if self._due else None

    @property
    def is_due(self) -> bool:
        return bool(self._due) and self._due[0][0] <= time.monotonic()

    def take_due(self) -> Iterator[ev.TimerFired]:
        """Those that are due, and those that become so meanwhile; without ``at_s``."""
        while self.is_due:
            yield heapq.heappop(self._due)[2]
