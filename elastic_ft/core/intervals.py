"""How often state is copied and written, from what that costs and how often things fail. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

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


class Typical:
    """The median of the last values: one hiccup (an evaluation, a stop) is no new truth."""

    BELIEVED, SURE, REMEMBERED = 4, 12, 31  # values

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=self.REMEMBERED)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float:
        return median(self._values) if self._values else 0.0

    @property
    def error(self) -> float:
        """Standard error of the median, from the median deviation: as of a normal distribution."""
        middle = self.value
        deviation = median(abs(value - middle) for value in self._values) if self._values else 0.0
        return 1.25 * 1.48 * deviation / math.sqrt(max(len(self._values), 1))

    @property
    def is_believed(self) -> bool:
        return len(self._values) >= self.BELIEVED

    @property
    def is_sure(self) -> bool:
        """Its ``error`` means something."""
        return len(self._values) >= self.SURE


class Cadence:
    """When to take snapshots, the same on every rank: from numbers that all have agreed on.

    Attributes:
        every: steps between snapshots. Without a fixed number each generation begins with one at
            each step: what is restored gets its second copy at once, and the cost is measured.
        next: the step after which the next one is due.
    """

    AGREEING = 3  # measurements in a row that must want a change

    def __init__(self, every: int | None, max_cost: float, max_steps: int) -> None:
        """``every`` None: as their cost advises, see ``snapshot_every`` for the rest."""
        self._auto, self._limits = every is None, (max_cost, max_steps)
        self.every = every or 1
        self.next = 0
        self._accounted, self._beside, self._without = Typical(), Typical(), Typical()
        self._ran = False  # a snapshot, in the step before
        self._wanted: deque[int] = deque(maxlen=self.AGREEING)

    @property
    def cost_s(self) -> float:
        """Of one snapshot: what was accounted for, or by how much longer its step surely takes.

        Steps vary by far more than a snapshot costs: a difference within that noise says nothing.
        """
        beside, without = self._beside, self._without
        if not (beside.is_sure and without.is_sure):
            return self._accounted.value
        noise = 3 * math.hypot(beside.error, without.error)
        return max(self._accounted.value, beside.value - without.value - noise)

    @property
    def step_s(self) -> float:
        """Of a step without one, as far as there were any."""
        return self._without.value or self._beside.value

    def taken(self, step: int) -> None:
        self.next = step + self.every

    def hurry(self) -> None:
        """The next one is due after the step under way."""
        self.next = 0

    def learn(self, cost_s: float, step_s: float) -> bool:
        """Means over ranks: cost of the snapshot that ended in this step (0: none did), and
        duration of the step before. Returns whether ``every`` has changed.
        """
        ran, self._ran = self._ran, cost_s > 0
        if step_s:
            (self._beside if ran else self._without).add(step_s)
        if cost_s:
            self._accounted.add(cost_s)
        if not self._auto or not cost_s or not self._accounted.is_believed:
            return False
        self._wanted.append(snapshot_every(self.cost_s, self.step_s, *self._limits))
        wanted = sorted(self._wanted)[len(self._wanted) // 2]
        if len(self._wanted) < self.AGREEING and self.every > 1:
            return False
        if any(self.every / 3 < one <= self.every for one in self._wanted):
            return False  # more often only if that is much more often, and not for one hiccup
        self.every = wanted
        self._wanted.clear()
        return True


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
