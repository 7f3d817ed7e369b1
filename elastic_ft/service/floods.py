"""How much one client may ask of the service at once: who asks for more is told when to come again,
and everybody else is answered meanwhile."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

from aiohttp import web


class AskedTooMuch(web.HTTPTooManyRequests):
    """``again_s``: after so long it may be asked again."""

    def __init__(self, text: str, again_s: float = 1.0) -> None:
        headers = {"Retry-After": str(max(1, math.ceil(again_s)))}
        super().__init__(text=f"{text}: ask again later", headers=headers)


class Pace:
    """Of each who has a name ``per_s`` requests a second, ``burst`` of them together after a pause,
    and ``at_once_max`` under way. Names are those of the service's users, so they have an end. Of
    one thread."""

    def __init__(self, per_s: float, burst: int, at_once_max: int) -> None:
        self._per_s, self._burst, self._at_once_max = per_s, burst, at_once_max
        self._left: dict[str, tuple[float, float]] = {}  # how many it had left, and when
        self._under_way: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """While it is answered. ``name``: "" where nobody has to say. Raises AskedTooMuch."""
        if name:
            self._take(name, time.monotonic())
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1

    def _take(self, name: str, now_s: float) -> None:
        if self._under_way[name] >= self._at_once_max:
            raise AskedTooMuch(f"{self._at_once_max} requests of {name}'s are under way already")
        had, then_s = self._left.get(name, (self._burst, now_s))
        left = min(float(self._burst), had + (now_s - then_s) * self._per_s)
        if left < 1.0:
            why = f"{name} asks more than {self._per_s:g} times a second"
            raise AskedTooMuch(why, (1.0 - left) / self._per_s)
        self._left[name] = left - 1.0, now_s


class Room:
    """For what is under way, bodies of requests and streams: so much of it, and of each who has a
    name so much. Of one thread.

    Args:
        what: in words, after how much of it there is.
    """

    def __init__(self, what: str, all_max: int, of_one_max: int) -> None:
        self._what, self._all_max, self._of_one_max = what, all_max, of_one_max
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def for_one(self, name: str, size: int = 1) -> Iterator[None]:
        """``name``: "" where nobody has to say. Raises AskedTooMuch, HTTPServiceUnavailable."""
        if size and name and self._taken[name] + size > self._of_one_max:
            raise AskedTooMuch(f"{self._taken[name]} {self._what} for {name} already")
        if size and self._taken.total() + size > self._all_max:
            taken = f"{self._taken.total()} {self._what} already"
            raise web.HTTPServiceUnavailable(text=f"{taken}: ask again later")
        self._taken[name] += size
        try:
            yield
        finally:
            self._taken[name] -= size
