"""What the function of a step may not do while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_ft.errors import UsageError


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
