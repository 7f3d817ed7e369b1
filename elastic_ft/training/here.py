"""What torch and Python keep for each thread, in the thread that makes a step as in the script's.

Default device (``torch.set_default_device``, ``with torch.device``), autocast, and whether there
are gradients: a function of the user's runs in another thread than the lines that call it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

AUTOCAST = ("cpu", "cuda")  # types of device
CPU = torch.device("cpu")


def as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which runs in any thread as it would in this one, now."""
    device = torch.get_default_device()
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in AUTOCAST}
    casts = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
    cached, gradients = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    variables = contextvars.copy_context()

    def run(*args: Any, **kwargs: Any) -> Any:
        for kind, dtype in dtypes.items():  # what an autocast without one takes
            torch.set_autocast_dtype(kind, dtype)
        with contextlib.ExitStack() as stack:
            for kind in casts:
                stack.enter_context(torch.autocast(kind, dtypes[kind], cache_enabled=cached))
            if torch.get_default_device() != device:
                stack.enter_context(device)
            if not gradients:  # around an evaluation there are none anyway
                stack.enter_context(torch.no_grad())
            # A copy: a thread that is left behind stays in its own.
            return variables.copy().run(function, *args, **kwargs)

    return run


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Around what is no code of the user's, in its thread: what says no device is on the CPU."""
    with CPU if torch.get_default_device() != CPU else contextlib.nullcontext():
        yield
