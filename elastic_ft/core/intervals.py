"""How often state is copied and written, from what that costs and how often things fail. Pure."""

from __future__ import annotations

import math

# So few that a noisy measurement does not change the choice all the time.
SNAPSHOT_INTERVALS = (1, 2, 3, 5, 8, 12, 20, 32, 50, 80)


def snapshot_every(cost_s: float, step_s: float, max_cost: float, max_steps: int) -> int:
    """Steps between snapshots, so that one costs at most ``max_cost`` of the time it covers.

    Args:
        cost_s: seconds by which one snapshot delays training.
        step_s: seconds of a step.
        max_cost: share of the time, e.g. 0.01.
        max_steps: bound on what a failure makes redo.
    """
    wanted = cost_s / max(step_s * max_cost, 1e-9)
    fitting = [steps for steps in SNAPSHOT_INTERVALS if steps >= wanted]
    return min(fitting[0] if fitting else SNAPSHOT_INTERVALS[-1], max_steps)


class Cadence:
    """When to take snapshots, the same on every rank: from numbers that all have agreed on.

    Attributes:
        every: steps between snapshots. Without a fixed number each generation begins with one at
            each step: what is restored gets its second copy at once, and the cost is measured.
        next: the step after which the next one is due.
    """

    MEASURED = 4  # snapshots before their cost is believed
    MEMORY = 0.9  # weight of what was known, when a new one is measured

    def __init__(self, every: int | None, max_cost: float, max_steps: int) -> None:
        """``every`` None: as their cost advises, see ``snapshot_every`` for the rest."""
        self._auto, self._limits = every is None, (max_cost, max_steps)
        self.every = every or 1
        self.next = 0
        self.cost_s = self.step_s = 0.0
        self._count = 0

    def taken(self, step: int) -> None:
        self.next = step + self.every

    def learn(self, cost_s: float, step_s: float) -> bool:
        """Means over ranks, of the snapshot that has ended (0: none) and of the last step.

        Returns whether ``every`` has changed.
        """
        if not self._auto or not cost_s or not step_s:
            return False
        self._count += 1
        weight = self.MEMORY if self._count > self.MEASURED else 1 - 1 / self._count
        self.cost_s = weight * self.cost_s + (1 - weight) * cost_s
        self.step_s = weight * self.step_s + (1 - weight) * step_s
        if self._count < self.MEASURED:
            return False
        before, self.every = self.every, snapshot_every(self.cost_s, self.step_s, *self._limits)
        return self.every != before


def checkpoint_every_s(write_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds between checkpoints that lose least to both writing and redoing.

    Daly's higher-order estimate (J. T. Daly, FGCS 22, 2006, eq. 37) of Young's sqrt(2 d M): d is
    what one checkpoint costs, M the mean time between failures that fall back to it.
    """
    d, m = max(write_s, 1e-6), max(mean_time_between_failures_s, 1e-6)
    if d >= 2 * m:
        return m
    x = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(x) / 3 + x / 9) - d
