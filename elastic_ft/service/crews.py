"""Threads in which what may take long is done for those who ask, so many at a time: the others wait
in a line that has an end, and behind it are told to come again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web

from elastic_ft.service.floods import AskedTooMuch


class Crew:
    """``threads`` that work for ``asked_max`` at once, those that wait included: for each who has a
    name ``of_one_max`` of them, and not with all threads while there are others. Who has fewer at
    work comes first, then whose turn it is."""

    def __init__(self, name: str, threads: int, asked_max: int, of_one_max: int) -> None:
        self.name, self.asked_max, self.of_one_max = name, asked_max, of_one_max
        self._threads, self._asked, self._working = threads, Counter[str](), Counter[str]()
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # of whoever waits, in turn
        self._pool, self._turn = ThreadPoolExecutor(threads, name), threading.Lock()

    async def do(self, by: str, function: Callable[..., Any], *args: Any) -> Any:
        """``by``: who asks; "" where nobody has to say. Raises HTTPServiceUnavailable where too
        many wait, AskedTooMuch where too many of ``by``'s do."""
        answer: Future[Any] = Future()
        with self._turn:
            if by and self._asked[by] >= self.of_one_max:
                raise AskedTooMuch(
                    f"{self._asked[by]} of {by}'s are waiting for {self.name} already"
                )
            if self._asked.total() >= self.asked_max:
                already = f"{self._asked.total()} are waiting for {self.name} already"
                raise web.HTTPServiceUnavailable(text=f"{already}: ask again later")
            self._asked[by] += 1
            work = partial(self._work, by, answer, partial(function, *args))
            self._lines.setdefault(by, deque()).append(work)
            self._begin()
        return await asyncio.wrap_future(answer)

    def _begin(self) -> None:
        """In whose turn it is."""
        of_one = max(1, self._threads - 1)
        while self._working.total() < self._threads:
            free = [by for by in self._lines if not by or self._working[by] < of_one]
            if not free:
                return
            by = min(free, key=self._working.__getitem__)
            line = self._lines.pop(by)
            self._pool.submit(line.popleft())
            self._working[by] += 1
            if line:  # behind the others
                self._lines[by] = line

    def _work(self, by: str, answer: Future[Any], function: Callable[[], Any]) -> None:
        try:
            if answer.set_running_or_notify_cancel():
                answer.set_result(function())
        except BaseException as error:  # whoever asked is told
            answer.set_exception(error)
        finally:
            with self._turn:
                for table in (self._asked, self._working):
                    table[by] -= 1
                    if not table[by]:
                        del table[by]
                self._begin()


# What asks a store or the cluster: while that is away, it may take its time. Jobs that have ended,
# of which anybody may ask for any number, are not in the way of those that run.
LOOKS = Crew("what lies in a store", 4, 256, 64)
RUNS = Crew("what runs", 4, 256, 64)
LOGS = Crew("logs of machines", 4, 1024, 256)
# What takes a processor alone: it waits for nobody who asks a store.
WORDS = Crew("long answers", 2, 256, 64)
LISTS = Crew("whole lists of jobs", 1, 64, 16)
READING = Crew("jobs to be read", 2, 1024, 256)  # what is sent: megabytes of YAML take minutes
