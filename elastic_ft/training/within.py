"""What the function of a step may not do while it runs, and what may not come in between."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from elastic_ft.errors import GroupBroken, UsageError

LATER = b"elastic_ft: interrupted: this ends after the running step; again: at once\n"
BROKEN_OFF = (
    "a step was interrupted in its middle, and what it had done is not known: start the script "
    "again, it goes on from its last checkpoint"
)


def without_exit(call: Callable[[], Any]) -> Any:
    """What it returns. Raises UsageError where it exits: its process would end without a word, and
    what takes its place do the same."""
    try:
        return call()
    except SystemExit as error:
        raise UsageError(
            f"@ctx.step: the function exits ({error.code}): let all ranks leave after the same "
            "step, by `break` from the loop over the loader"
        ) from error


def check_outside(inside: bool) -> None:
    """Raises UsageError in a step's function, which the job waits for, and beside it."""
    if inside:
        raise UsageError(
            "ctx: a batch, a step or an evaluation was asked for while the function of a step "
            "runs, by it or by another thread: one thread goes over the loader, makes the step and "
            "then goes on"
        )


def broken_off(error: BaseException) -> Exception:
    """What the job is told of ``error``, which has left the block of an attempt. What is no error
    (Ctrl-C, an exit) blames nobody: the attempt is over, and the step is made again."""
    if isinstance(error, Exception):
        return error
    return GroupBroken(f"the attempt was left by {type(error).__name__}")


class Interrupts:
    """Keeps a Ctrl-C, while the job has the step, until the script's own code runs again: so that
    it leaves the loop, and not the job. The second one comes at once."""

    def __init__(self) -> None:
        self._came, self._before, self.are_lost = False, False, False

    def __enter__(self) -> None:
        if self.are_lost:
            raise UsageError(BROKEN_OFF)
        self._before = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._before:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: Any) -> None:
        if self._before:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self.are_lost = True
            raise KeyboardInterrupt
        self._came = True
        os.write(2, LATER)

    @property
    def has_come(self) -> bool:
        """One that ``deliver`` would raise."""
        return self._came

    def deliver(self) -> None:
        """Raises KeyboardInterrupt if one has come."""
        came, self._came = self._came, False
        if came:
            raise KeyboardInterrupt
