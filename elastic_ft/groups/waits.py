"""What a thread that trains waits for in collectives, by kind, where they are Gloo's.

Gloo's own threads send and receive; who needs the result waits for it, in ``Work.wait`` or in
``wait_tensor``, which are timed here. torch's DDP waits in C++, and says itself for how long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private

EVERY_STEPS = 10  # a step of a generation is timed; DDP times its tenths, too

SecondsByKind = dict[str, float]  # by kind


class Waits:
    """Of this process: one thread of it trains at a time, and only that one's waits count. One that
    was left behind in a wait may wake at any later time: it changes nothing here."""

    def __init__(self) -> None:
        self._exposed: SecondsByKind = {}
        self._thread: int | None = None  # that is timed; None: nobody
        self._mine = threading.local()  # named: the kind of all waits, for a moment
        self._is_set_up = False
        self._runners: list[DistributedDataParallel] = []

    def watch(self, runner: DistributedDataParallel) -> DistributedDataParallel:
        """Its waits count, too, until ``forget``."""
        torch_private.time_every(runner, EVERY_STEPS)
        self._runners.append(runner)
        return runner

    def forget(self) -> None:
        """A generation is over."""
        self._runners.clear()
        self._thread = None

    def end(self) -> None:
        """This thread's waits count no longer."""
        if self._wants():
            self._thread = None

    def begin(self) -> None:
        """From now on, until ``take``, waits of this thread count."""
        if not self._is_set_up:
            torch_private.on_waits(self._wants, self._add)
            self._is_set_up = True
        self._exposed, self._thread = {}, threading.get_ident()

    @contextlib.contextmanager
    def named(self, kind: str) -> Iterator[None]:
        """What is waited for inside is of that kind."""
        before, self._mine.named = self._named, kind
        try:
            yield
        finally:
            self._mine.named = before

    def take(self) -> tuple[SecondsByKind, SecondsByKind]:
        """Seconds since ``begin``: waited for, and in flight while the thread computed (of DDP's
        all-reduces alone, from the first bucket on: of others nobody knows when they ended)."""
        self._thread, exposed, hidden = None, self._exposed, SecondsByKind()
        for runner in self._runners:
            if runner.logger is None:  # let go of already
                continue
            waited_s, behind_s = torch_private.reducer_times(runner)
            exposed["all_reduce"] = exposed.get("all_reduce", 0.0) + waited_s
            hidden["all_reduce"] = hidden.get("all_reduce", 0.0) + behind_s
        return exposed, hidden

    def _wants(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def _named(self) -> str | None:
        return getattr(self._mine, "named", None)

    def _add(self, kind: str, seconds: float) -> None:
        if not self._wants():  # any more
            return
        kind = self._named or kind
        self._exposed[kind] = self._exposed.get(kind, 0.0) + seconds


WAITS = Waits()
