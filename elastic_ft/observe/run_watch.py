"""The picture of a run, kept up to date from its folder: local or remote, running or ended."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import PurePosixPath
from typing import Any

from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.observe import run_reader
from elastic_ft.observe.alive import Vigil, seems_dead
from elastic_ft.observe.lines import Line, local_path
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
        self._is_remote = local_path(self._reader.url) is None
        self._result: dict[str, Any] = {}  # as it was read last
        self._next_result_s = 0.0
        self._whole_of: dict[str, Any] = {}  # the result up to which all was read

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
            found = self._known_result() if result is None else result
            try:
                if not (self._is_remote and found and found == self._whole_of):
                    self._read(whole=bool(found))  # it has ended: who looks may not look again
                    self._whole_of = found
            except StoreFailed:  # the next look sees more
                self._read()
            return self._look(found)

    def _known_result(self) -> dict[str, Any]:
        """Of a remote run no oftener than its other files are read, however many look."""
        if not self._is_remote or time.monotonic() >= self._next_result_s:
            self._result = self._reader.result()
            self._next_result_s = time.monotonic() + run_reader.REMOTE_EVERY_S
        return self._result

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
