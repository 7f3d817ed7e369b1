"""Threads that were left behind in a collective which never ended: none comes back to user code.

Once such a collective fails after all, minutes later, its thread would run what the user's function
has in its ``finally``, on a model that is in another step by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_left: dict[int, list[object]] = {}  # by identifier of the thread: what it keeps in use


def leave(thread: int, in_use: list[object]) -> None:
    """``thread`` sleeps in what ``stays_inside`` encloses, or in nothing of the user's."""
    _left[thread] = in_use


def forget(thread: int) -> None:
    """It has come to its end."""
    _left.pop(thread, None)


@contextlib.contextmanager
def stays_inside() -> Iterator[None]:
    """Around what may wait in a collective. Whoever was left behind in it stays there for good, as
    no thread can be ended from outside; what it had in use is let go."""
    try:
        yield
    finally:
        if (in_use := _left.get(threading.get_ident())) is not None:
            in_use.clear()
            threading.Event().wait()
