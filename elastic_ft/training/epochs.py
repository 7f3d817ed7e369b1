"""Which steps are those of an epoch, of a loop over epochs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import Loader
from elastic_ft.worker.step import Step


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The epochs of one call of ``ctx.epochs``.

    Attributes:
        before: the last step of the calls before it.
        numbers: of its epochs, as the script counts them.
        steps: of each.
    """

    before: int
    numbers: Sequence[int]
    steps: int

    def __str__(self) -> str:
        return f"{self.numbers}, of {self.steps} steps each, from step {self.before + 1} on"

    @property
    def last(self) -> int:
        """Its last step."""
        return self.before + len(self.numbers) * self.steps

    def epoch_of(self, step: int) -> int:
        """Its number."""
        return self.numbers[(step - self.before - 1) // self.steps]

    def last_of(self, step: int) -> int:
        """The last step of the epoch that has ``step``."""
        return step - self.place(step) + self.steps - 1

    def place(self, step: int) -> int:
        """Of a step in its epoch, from 0."""
        return (step - self.before - 1) % self.steps


def span_of(loader: Loader, before: int, numbers: Sequence[int], steps: int | None) -> EpochSpan:
    """Of ``steps`` steps each, or of one pass. Raises ConfigError."""
    if steps is None:
        if loader.is_stream:
            raise ConfigError(
                "ctx.epochs: nobody knows how long a stream is, or what a script draws itself: "
                "say of how many steps an epoch is, ctx.epochs(n, steps=...), or leave the loop "
                "over epochs out, and say `steps` to init"
            )
        steps = len(loader)
    if steps < 1:
        raise ConfigError(f"ctx.epochs: steps: expected at least 1, found {steps}")
    return EpochSpan(before, numbers, steps)


def check_through(span: EpochSpan | None, made: int, until: int) -> None:
    """Raises ConfigError where the loop over the loader was left after step ``made``, before its
    end, with step ``until`` of an epoch: who joins in the middle would leave it elsewhere."""
    if span is None:
        raise ConfigError(
            f"ctx.each: what goes over the loader ended after step {made}, before the loader: who "
            "joins in the middle would end elsewhere: say `steps` to init"
        )
    if made < until:
        raise ConfigError(
            f"ctx.epochs: the loop over the loader was left after step {made}, "
            f"{span.place(made) + 1} of {span.steps} in its epoch: who joins in the middle would "
            "leave it elsewhere: say ctx.epochs(n, steps=...), where epochs are to be shorter"
        )


def last_step(span: EpochSpan | None, until: int, step: int, made: Step | None) -> int:
    """Of the epoch that has ``step``, which the loader gives; 0 outside epochs. That is an earlier
    one than the running epoch, which ends with step ``until``, where the job went back. Where the
    running one has ended while this process was on the bench: the last that it has made there.

    Raises ConfigError where ``step`` is of a later one.
    """
    if span is None:
        return 0
    last_made = made.number if made is not None else 0
    if last_made < until < step:
        return last_made
    if step > until:
        raise ConfigError(
            f"ctx.epochs: the loader was gone over twice in an epoch, which has {span.steps} steps "
            f"and has ended with step {until}: go over it once in each, with more epochs, or more "
            "steps in each: ctx.epochs(n, steps=...); a pass that trains nothing goes over a "
            "DataLoader of its own"
        )
    return span.last_of(step)


def begin_loop(before: int, span: EpochSpan | None, workers_max: int) -> int:
    """0. Warns where a loop over the loader that gave ``before`` batches was left, and another
    begins: who joins, and the job after a restart, begins in the first one. One batch at a time
    (``next(iter(loader))``) is no loop."""
    if before > 1 and span is None and workers_max > 1:
        warnings.warn(
            f"the loader was left after {before} batches, and is gone over again: who joins begins "
            "in the first loop over it: give each part its steps, by ctx.epochs(n, steps=...)",
            stacklevel=3,
        )
    return 0
