"""What a run did over time, in bounded memory: however long it takes, a picture of it is small.

``x`` is in seconds since the run began. Nothing is random, and nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Point = tuple[float, int, float | None]  # x, step, value; None where it is not finite

BUCKETS_MAX = 240
BINS_MAX = 240
FIRST_BIN_S = 0.25
BURST_S, BURST = 0.05, 0.1  # of a burst: how long; or of the time before it, which part


@dataclass(slots=True)
class Bucket:
    """Neighbours in a series: of all of them, those that a picture must show."""

    first: Point
    last: Point
    low: Point
    high: Point
    broken: Point | None = None  # the first of them without a value

    def shown(self) -> Iterator[Point]:
        kept = {self.first, self.last, self.low, self.high}
        yield from sorted(kept | ({self.broken} if self.broken else set()), key=lambda p: p[:2])

    def take(self, point: Point) -> None:
        self.last, value = point, point[2]
        if value is None:
            self.broken = self.broken or point
            return
        if self.low[2] is None or value < self.low[2]:
            self.low = point
        if self.high[2] is None or value > self.high[2]:
            self.high = point

    def joined(self, after: Bucket) -> Bucket:
        return Bucket(
            self.first,
            after.last,
            min(self.low, after.low, key=_low),
            max(self.high, after.high, key=_high),
            self.broken or after.broken,
        )


def _low(point: Point) -> float:
    return float("inf") if point[2] is None else point[2]


def _high(point: Point) -> float:
    return float("-inf") if point[2] is None else point[2]


class Extremes:
    """A series in ``buckets_max`` stretches, an even number, of equally many points; of each the
    first, the last, the lowest and the highest are kept, and one that is not finite."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._buckets_max = buckets_max
        self._per_bucket, self._in_last = 1, 0
        self._buckets: list[Bucket] = []

    def add(self, x: float, step: int, value: float | None) -> None:
        point = (round(x, 3), step, value)
        if self._buckets and self._in_last < self._per_bucket:
            self._buckets[-1].take(point)
            self._in_last += 1
            return
        if len(self._buckets) == self._buckets_max:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [before.joined(after) for before, after in pairs]
            self._per_bucket *= 2
        one = Bucket(point, point, point, point, point if value is None else None)
        self._buckets.append(one)
        self._in_last = 1

    def points(self) -> list[Point]:
        return [point for bucket in self._buckets for point in bucket.shown()]


@dataclass(slots=True)
class Bins:
    """Amounts by kind, spread over the time in which they came about. No amount is lost: bins
    become twice as wide when there are too many."""

    bins_max: int = BINS_MAX
    width_s: float = FIRST_BIN_S
    bins: list[dict[str, float]] = field(default_factory=list)

    def add(self, kind: str, from_x: float, to_x: float, amount: float) -> None:
        """An amount that came about evenly from ``from_x`` to ``to_x``."""
        from_x, to_x = max(0.0, from_x), max(0.0, from_x, to_x)
        while to_x >= self.bins_max * self.width_s:
            self._widen()
        last = int(to_x / self.width_s)
        self.bins.extend({} for _ in range(last + 1 - len(self.bins)))
        spent = to_x - from_x
        for number in range(int(from_x / self.width_s), last + 1):
            share = 1.0
            if spent > 0:
                begin, end = number * self.width_s, (number + 1) * self.width_s
                share = max(0.0, min(end, to_x) - max(begin, from_x)) / spent
            if share > 0:
                held = self.bins[number]
                held[kind] = held.get(kind, 0.0) + share * amount

    def move(self, before: str, after: str, to_x: float, amount: float) -> None:
        """So much of kind ``before`` was of kind ``after``: the last of it before ``to_x``."""
        for held in reversed(self.bins[: int(max(0.0, to_x) / self.width_s) + 1]):
            moved = min(held.get(before, 0.0), amount)
            if moved > 0:
                held[before] -= moved
                held[after] = held.get(after, 0.0) + moved
                amount -= moved

    def _widen(self) -> None:
        self.width_s *= 2
        odd = [*self.bins, {}] if len(self.bins) % 2 else self.bins
        self.bins = [_sum(a, b) for a, b in zip(odd[::2], odd[1::2], strict=True)]

    def wider(self, width_s: float) -> Bins:
        """The same, in bins of at least that width."""
        found = self.copy()
        while found.width_s < width_s:
            found._widen()
        return found

    def by_kind(self, kinds: Iterable[str]) -> dict[str, list[float]]:
        return {kind: [short(held.get(kind, 0.0)) for held in self.bins] for kind in kinds}

    def totals(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for held in self.bins:
            found = _sum(found, held)
        return found

    def copy(self) -> Bins:
        return Bins(self.bins_max, self.width_s, [dict(held) for held in self.bins])


class Throughput:
    """An amount per second. What comes together, as steps that are committed together, came about
    since what was before it."""

    def __init__(self) -> None:
        self._bins = Bins()
        self._burst = (0.0, 0.0, 0.0)  # where it began, its first one, the amount
        self._last_x = 0.0

    def begin(self, x: float) -> None:
        """Nothing came about before ``x`` that is not known."""
        self._close(x)

    def add(self, x: float, amount: float) -> None:
        from_x, first_x, held = self._burst
        if held and x - first_x > BURST_S + BURST * (first_x - from_x):
            self._close(self._last_x)
            from_x, first_x, held = self._burst
        self._burst = (from_x, first_x if held else x, held + amount)
        self._last_x = max(self._last_x, x)

    def _close(self, x: float) -> None:
        from_x, _, held = self._burst
        if held:
            self._bins.add("", from_x, self._last_x, held)
        self._burst = (x, x, 0.0)

    def per_second(self, width_s: float) -> tuple[float, list[float]]:
        """The width of bins, at least ``width_s``; by bin: how much in a second."""
        bins = self._bins.copy()
        if self._burst[2]:
            bins.add("", self._burst[0], self._last_x, self._burst[2])
        bins = bins.wider(width_s)
        values = [held.get("", 0.0) for held in bins.bins]
        spans = [bins.width_s] * len(values)
        if values:
            spans[-1] = self._last_x - (len(values) - 1) * bins.width_s
        if len(values) > 1 and spans[-1] < bins.width_s / 2:  # too little to be told alone
            values[-2:] = [(values[-2] + values[-1])] * 2
            spans[-2:] = [(spans[-2] + spans[-1])] * 2
        return bins.width_s, [short(v / max(s, 1e-6)) for v, s in zip(values, spans, strict=True)]


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {kind: a.get(kind, 0.0) + b.get(kind, 0.0) for kind in {**a, **b}}


def short(value: float) -> float:
    """Four digits: what a picture can show."""
    return float(f"{value:.4g}")
