"""Goodput: which seconds of the wall clock went where."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Totals:
    """Fractions of and seconds in ``wall_s``; goodput plus badput's sum is the whole."""

    wall_s: float
    goodput: float  # fraction of the wall clock in running generations
    badput: dict[str, float]  # cause -> seconds


@dataclass(slots=True)
class Accounts:
    """Attributes the time between changes of the job's phase.

    ``running`` is productive; everything else goes to its cause: "startup" until the first
    generation trains, "suspended", or "recovery:<cause>".
    """

    started_at_s: float
    _phase: str = "starting"
    _cause: str = "startup"
    _since_s: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: str, cause: str, now_s: float) -> None:
        self._book(now_s)
        if phase == "running":
            self._cause = ""
        elif phase == "suspended":
            self._cause = "suspended"
        elif phase in ("pausing", "forming") and cause:
            self._cause = f"recovery:{cause}"
        elif phase == "ended":
            self._cause = "shutdown"
        self._phase = phase

    def _book(self, now_s: float) -> None:
        spent = max(0.0, now_s - (self._since_s or self.started_at_s))
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + spent
        self._since_s = now_s

    def close(self, now_s: float) -> Totals:
        self._book(now_s)
        wall = max(1e-9, now_s - self.started_at_s)
        productive = self._seconds.get("", 0.0)
        badput = {cause: round(s, 4) for cause, s in sorted(self._seconds.items()) if cause}
        return Totals(round(wall, 4), round(productive / wall, 6), badput)
