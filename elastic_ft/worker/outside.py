"""The script's own code between two steps: as long as it computes, nothing hangs.

An export, say, or an evaluation. Whoever waits for it in a collective stands still. So it is looked
at with each heartbeat: what runs is a mark of progress, what waits for others is none, and after
``OUTSIDE_TIMEOUTS`` hang timeouts it is judged like everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_ft.faults import Points
from elastic_ft.transport.stacks import collective_in, stack_of

OUTSIDE_TIMEOUTS = 8  # less than ends the collectives that others wait in (LAST_RESORT_TIMEOUTS)
GROUPS = "elastic_ft/groups/"


class Outside:
    """Args:
    standing: identifier of the thread that runs.
    tell: is told once of code that takes longer than a hang timeout.
    """

    def __init__(
        self,
        points: Points,
        standing: Callable[[], int],
        hang_timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._points, self._standing, self._tell = points, standing, tell
        self._hang_timeout_s = hang_timeout_s
        self._told_s = 0.0  # of which the last word was

    def look(self, now_s: float | None = None) -> None:
        since_s = self._points.outside_since_s
        if not since_s:
            return
        took_s = (time.monotonic() if now_s is None else now_s) - since_s
        limit_s = OUTSIDE_TIMEOUTS * self._hang_timeout_s
        frames = stack_of(self._standing())
        if took_s > limit_s or waits(frames):
            return
        self._points.count += 1
        if took_s > self._hang_timeout_s and self._told_s != since_s:
            self._told_s = since_s
            self._tell(
                f"the script's code between two steps has run for {took_s:.0f} s, the others wait: "
                f"after {limit_s:g} s (elastic.hang_timeout_s) it passes for a hang"
            )


def waits(frames: tuple[str, ...]) -> bool:
    """For others: in a collective, or at the store."""
    return bool(collective_in(frames)) or any(GROUPS in frame for frame in frames[:3])
