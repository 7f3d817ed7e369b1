"""A terminal beside a job that goes on without it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from elastic_ft.cli.progress import say
from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.observe.run_reader import RunReader

POLL_S = 0.2
SECOND_S = 5.0  # within which a second Ctrl-C leaves


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job has ended that ran without us.

    ``code``: 0 with a result.json; 2: a user's mistake; 1: anything else. ``line``: why no result.
    """

    code: int
    line: str = ""


class GoesOn(Protocol):
    """A job that goes on without this process, on plain processes or on Ray."""

    def poll(self, timeout_s: float) -> Any:
        """What has the fields of ``Ending``; None while it runs, after ``timeout_s``."""

    def stop(self) -> None:
        """In good order; the second time: at once. Returns at once."""


def stay(job: GoesOn, out: str, came: list[int], stops: bool) -> Any:
    """Until it has ended: how; None: this terminal has left it running.

    At a terminal an interrupt asks whether to leave. Elsewhere (a script, a supervisor), and by
    SIGTERM (``docker run -t``), it stops the job, where ``stops``, or else leaves it.

    Args:
        came: of ``interrupts``.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    count, stopped, asked_at_s = 0, 0, -SECOND_S
    while (ended := job.poll(POLL_S)) is None:
        for number in came[count:]:
            count += 1
            asks = is_terminal and number == signal.SIGINT
            if stops and not asks:
                stopped += 1
                if stopped > 2:
                    raise KeyboardInterrupt
                job.stop()
            elif not asks or time.monotonic() - asked_at_s < SECOND_S:
                say(f"left running; elastic-ft attach {out} shows it again")
                return None
            else:
                asked_at_s = time.monotonic()
                say(
                    "the job goes on without this terminal: Ctrl-C again to leave it running, "
                    f"elastic-ft stop {out} stops it"
                )
    return ended


def interrupt_on_sigterm() -> None:
    """SIGTERM does what Ctrl-C does, also where SIGINT is ignored: a shell without job control has
    what it starts with ``&`` ignore it."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    signal.signal(signal.SIGTERM, interrupt)


def leave_when_interrupted(code: int) -> None:
    """From now on, as all that is asked for is done: libraries may take their time at the end, and
    who does not wait for that is shown no traceback of it, and told ``code`` all the same."""

    def leave(signum: int, frame: FrameType | None) -> None:
        os._exit(code)

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Each that comes is noted, and does nothing else."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda signum, _: came.append(signum)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def result_of(ended: Any, out: str) -> dict[str, Any]:
    """What is in result.json. Raises the error in which the job has ended, if it has none."""
    if ended.code == 2:
        raise ConfigError(ended.line)
    if ended.code:
        raise JobFailed(ended.line)
    return RunReader(out).result()
