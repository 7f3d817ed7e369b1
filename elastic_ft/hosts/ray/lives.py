"""Which of its lives an actor is in, and how one that lives again is called."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)
CALL_AGAIN_S, CALL_AGAIN_MAX_S = 0.05, 1.0


def is_restarted_actor() -> bool:
    """Whether Ray has made the actor that calls again. Ray asks its own deprecated names for it,
    and its warning of that would be the first line of each actor's log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def call_until(is_done: Callable[[], bool], call: Callable[[], ray.ObjectRef]) -> None:
    """Calls an actor that lives again, or soon does, until ``is_done``.

    Who calls may not have been told yet that it lives, not even its own process. Ray keeps such a
    call back for 2 s, then says that it has failed; one made meanwhile gets through at once.

    Args:
        call: twice is as good as once. No deadline: while the GCS is away calls fail, and an actor
            that nobody calls has nothing else to do.
    """
    again_s = CALL_AGAIN_S
    while not is_done():
        until_s = time.monotonic() + again_s
        try:
            called = call()
            if ray.wait([called], timeout=again_s)[0]:
                ray.get(called)
        except RayError as error:
            log.info("an actor is called again: %s: %s", type(error).__name__, error)
        if not is_done():  # answered at once, it is not asked again at once
            time.sleep(max(0.0, until_s - time.monotonic()))
        again_s = min(again_s * 2, CALL_AGAIN_MAX_S)
