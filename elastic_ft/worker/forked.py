"""What a process does that others are forked from, and what those do first."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For imports: what they make is here to stay, and to look for garbage in it takes a quarter of
    their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def imported_for_all() -> Iterator[None]:
    """For imports of a process that others are forked from: no collection looks at what there is by
    their end, there or in one that was forked, where to look is to copy."""
    with uncollected():
        yield
        gc.freeze()


def draw_apart() -> None:
    """From numpy's and torch's global generators, which would draw the same in all of them;
    Python's own begins anew in each."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
