"""The picture of a run, kept up to date from its folder: local or remote, running or ended."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import PurePosixPath
from typing import Any

from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.observe.alive import Vigil, seems_dead
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.observe.run_view import RunView

PIECE_BYTES = 1 << 18


class RunWatch:
    """Each ``look`` reads what is new alone. From any thread.

    Args:
        job: of the run; none: what its job.yaml says, if that can be read.
    """

    def __init__(self, url: str, job: Job | None = None) -> None:
        self._reader = RunReader(url)
        self._events = self._reader.tail("events.jsonl")
        self._steps = self._reader.tail("steps.jsonl")
        self._view = RunView(job, PurePosixPath(self._reader.url).name or "run")
        self._vigil: Vigil | None = None
        self._turn = threading.Lock()

    def read(self, rest: float = 0.0) -> None:
        """What is new, a piece after the other. Raises ConfigError where a line is none that a
        run writes.

        Args:
            rest: after each piece, as a multiple of the time that it took: for the process's other
                threads.
        """
        with self._turn:
            self._read(rest)

    def _read(self, rest: float = 0.0, whole: bool = False) -> None:
        if not self._view.knows_the_job:  # it is written when the run begins
            with contextlib.suppress(ConfigError):  # of another version: the lines are there
                self._view.know(self._reader.job())
        waiting: list[Line] = []
        began_s = time.monotonic()
        while steps := self._steps.read(PIECE_BYTES, whole):
            waiting += self._led(whole)  # after the steps: what led to them is among it
            waiting = self._view.feed(waiting, steps, until_last_step=True)
            time.sleep(rest * (time.monotonic() - began_s))
            began_s = time.monotonic()
        self._view.feed(waiting + self._events.read(whole=whole), [])

    def _led(self, whole: bool) -> list[Line]:
        """Events, to be shown with steps that are read and would be lost if this raised."""
        try:
            return self._events.read(whole=whole)
        except StoreFailed:  # they come with later ones
            return []

    def look(self, result: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is to be seen of the run now. Raises ConfigError.

        Args:
            result: what is in result.json, if the caller knows; else it is read.
        """
        with self._turn:
            found = self._reader.result() if result is None else result
            try:
                self._read(whole=bool(found))  # it has ended: who looks may not look again
            except StoreFailed:  # the next look sees more
                self._read()
            return self._look(found)

    def _look(self, found: dict[str, Any]) -> dict[str, Any]:
        seen = self._view.as_json(time.time(), result=found)
        if seen["ended_at_s"] is not None:
            return seen
        if self._vigil is None:
            self._vigil = Vigil(self._reader.url)
            dead = seems_dead(self._reader.url)
        else:
            dead = self._vigil.look()
        return self._view.as_json(time.time(), result=found, dead=dead) if dead else seen
