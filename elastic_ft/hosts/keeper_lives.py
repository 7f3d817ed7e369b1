"""When a node's keeper is started again: always, after pauses that grow where it ends early."""

from __future__ import annotations

import time
from dataclasses import dataclass

EARLY_S = 60.0  # after its start
AGAIN_S = (0.0, 0.0, 0.0, 5.0, 30.0, 300.0)  # after so many in a row that have ended early


@dataclass(slots=True)
class KeeperLives:
    """Of one node.

    Attributes:
        early: how many in a row have ended early.
        began_s: the last one, on the monotonic clock.
    """

    early: int = 0
    began_s: float = 0.0

    def begin(self) -> None:
        self.began_s = time.monotonic()

    def end(self) -> float:
        """Returns in how many seconds the next one is to begin."""
        is_early = time.monotonic() - self.began_s < EARLY_S
        self.early = self.early + 1 if is_early else 0
        return AGAIN_S[min(self.early, len(AGAIN_S) - 1)]
