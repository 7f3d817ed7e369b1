"""Threads in which what may take long is done for those who ask, so many at a time: the others wait
in a line that has an end, and behind it are told to come again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web


class Crew:
    """``threads`` that work for ``asked_max`` at once, those that wait included."""

    def __init__(self, name: str, threads: int, asked_max: int) -> None:
        self.name, self.asked_max, self._asked = name, asked_max, 0
        self._pool, self._turn = ThreadPoolExecutor(threads, name), threading.Lock()

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Raises HTTPServiceUnavailable where too many wait."""
        with self._turn:
            if self._asked >= self.asked_max:
                raise web.HTTPServiceUnavailable(
                    text=f"{self._asked} are waiting for {self.name} already: ask again later"
                )
            self._asked += 1
        try:
            work = self._pool.submit(function, *args)
        except BaseException:
            self._leave()
            raise
        work.add_done_callback(lambda _: self._leave())  # who asked may have gone: it is done yet
        return await asyncio.wrap_future(work)

    def _leave(self) -> None:
        with self._turn:
            self._asked -= 1


class Streams:
    """How many are followed, by whom: each costs this process some work for as long as it lasts."""

    def __init__(self, at_once_max: int, of_one_max: int) -> None:
        self._at_once_max, self._of_one_max = at_once_max, of_one_max
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """``name``: who follows; "" where nobody has to say. Of one thread. Raises
        HTTPServiceUnavailable."""
        most = self._of_one_max if name else self._at_once_max
        if self._open.total() >= self._at_once_max or self._open[name] >= most:
            raise web.HTTPServiceUnavailable(
                text=f"{self._open.total()} streams are followed already, {self._open[name]} of "
                f"them by {name or 'whoever reaches this machine'}: ask again later"
            )
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1


# What asks a store or the cluster: while that is away, it may take its time.
LOOKS = Crew("what lies in a store", 4, 64)
LOGS = Crew("logs of machines", 4, 1024)
# What takes a processor alone: it waits for nobody who asks a store.
WORDS = Crew("long answers", 2, 64)
LISTS = Crew("whole lists of jobs", 1, 64)
READING = Crew("jobs to be read", 2, 1024)  # what is sent: megabytes of YAML take minutes
