"""Ray's generator of ids, where processes fork (private names of Ray: as ``ray_private``, but for
``ray.train``, which must not be imported before)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray.actor
from ray._raylet import ActorClassID, WorkerID


class _ClassIds:
    """``ActorClassID`` as ``ray.actor`` uses it."""

    @staticmethod
    def from_random() -> Any:
        return ActorClassID(os.urandom(ActorClassID.size()))


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Where actor classes are defined in a process that will be forked: Ray's generator draws
    nothing meanwhile. It is seeded with its first draw, and forks would all draw the same ids."""
    ray.actor.ActorClassID = _ClassIds  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        ray.actor.ActorClassID = ActorClassID  # type: ignore[misc]


def draws_apart() -> bool:
    """Whether processes that are forked from this one draw different ids."""
    return _forked_draw() != _forked_draw()


def _forked_draw() -> bytes:
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.write(theirs, WorkerID.from_random().binary())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        return file.read()
