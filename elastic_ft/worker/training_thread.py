"""The thread that generations train in, and how it is left behind when a collective never ends.

Gloo fails what is pending when a connection ends, but for one thing: a payload that is half
through (``Pair::signalException`` leaves those buffers out) waits out its timeout of minutes, and
whoever waits for it in C++ can't be woken. A survivor need not die for that: its model is as the
last step left it. So generations run in a thread of their own, for the one that takes their steps;
if it sleeps in a collective of a group that was aborted, a fresh thread takes its place. What torch
keeps for each thread (DTensor's caches, by mesh) makes it one thread for all of them otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from elastic_ft import torch_private
from elastic_ft.engines import left_behind
from elastic_ft.errors import GroupBroken

T = TypeVar("T")
POLL_S = 0.05  # while what runs is broken
CALM_S = 0.25  # while it is not: a look takes the thread that trains its interpreter
ASLEEP_S = 0.3  # a closed connection ends what waits for it in milliseconds, or never
TORCH = str(Path(torch.__file__).parent)
IN_TORCH = (TORCH, torch_private.__file__)


@dataclass
class _Run:
    """One generator in the thread. ``in_use``: what the thread, left behind, still uses."""

    items: Generator[Any]
    asked: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[tuple[str, Any]] = field(default_factory=SimpleQueue)
    in_use: list[object] = field(default_factory=list)


class TrainingThread:
    """Runs one generator after another for the thread that iterates over ``run``.

    Only one of the two threads runs at a time. ``current`` is the identifier of that one.
    """

    def __init__(self) -> None:
        self.current = threading.get_ident()
        self.left_behind: list[object] | None = None  # of the last run, if it was: see ``run``
        self._runs: SimpleQueue[_Run | None] | None = None
        self._thread: threading.Thread | None = None

    def run(self, items: Generator[T], broken: Callable[[], str]) -> Iterator[T]:
        """Yields what ``items`` does, and raises what it raises.

        Args:
            broken: says why no collective of it can end any more, or "" while they can.

        Raises GroupBroken if ``broken`` and the thread sleeps in torch for good. It is then left
        behind, and ``left_behind`` is a list: what it still uses must be put there, and is kept
        until the thread wakes to its error and ends.
        """
        self.left_behind = None
        return self._run(items, broken)

    def call(self, function: Callable[[], object]) -> None:
        """Runs ``function`` in the thread, and raises what it raises."""
        for _ in self._run((function() for _ in range(1)), lambda: ""):
            pass

    def _run(self, items: Generator[T], broken: Callable[[], str]) -> Iterator[T]:
        run = _Run(items)
        self._start().put(run)
        try:
            while True:
                kind, value = self._next(run, broken)
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield value
        finally:
            run.asked.put(False)

    def close(self) -> None:
        """The thread ends once nothing runs in it."""
        if self._runs is not None:
            self._runs.put(None)

    def _start(self) -> SimpleQueue[_Run | None]:
        if self._runs is None:
            self._runs = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._runs,), name="training", daemon=True
            )
            self._thread.start()
        return self._runs

    def _next(self, run: _Run, broken: Callable[[], str]) -> tuple[str, Any]:
        assert self._thread is not None and self._thread.ident is not None
        caller, self.current = threading.get_ident(), self._thread.ident
        run.asked.put(True)
        asleep_s, seen, reason = 0.0, 0, ""
        try:
            while True:
                try:
                    return run.answers.get(timeout=POLL_S if reason else CALM_S)
                except Empty:
                    reason = broken()
                    switches = _sleeps_in_torch(self._thread) if reason else 0
                    asleep_s = asleep_s + POLL_S if switches and switches == seen else 0.0
                    seen = switches
                    if asleep_s >= ASLEEP_S:
                        self.close()
                        left_behind.leave(self._thread.ident, run.in_use)
                        self._runs, self.left_behind = None, run.in_use
                        raise GroupBroken(reason) from None
        finally:
            self.current = caller


def _serve(runs: SimpleQueue[_Run | None]) -> None:
    while (run := runs.get()) is not None:
        while run.asked.get():
            try:
                answer = "item", next(run.items)
            except StopIteration:
                answer = "end", None
            except BaseException as error:  # raised in the thread that asked
                answer = "error", error
            run.answers.put(answer)
            del answer
        run.items.close()
        del run  # and with it what it kept in use
    left_behind.forget(threading.get_ident())


def _sleeps_in_torch(thread: threading.Thread) -> int:
    """How often ``thread`` has gone to sleep, if it is asleep in a call of torch; else 0.

    Torch's collectives are called from its own Python, or from ours around it. User code that
    sleeps is not in it, and would go on with a model that others use by then.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith(IN_TORCH):
        return 0
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if not values["State"].startswith("S"):
        return 0
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return sum(int(values[name]) for name in switches)
