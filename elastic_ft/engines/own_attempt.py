"""One attempt at a step that a user's function makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.modules import TermCounts
from elastic_ft.engines.own_watch import Versions
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.models.loss import IGNORED_LABEL

# (loss sum, terms, squares, checksums) of this rank -> terms of all, squares of all
Agree = Callable[[float, int, float, Sequence[float]], tuple[int, float]]


class Running:
    """One attempt at a step: what the user's function has told so far."""

    def __init__(
        self, number: int, micro_batches: Sequence[MicroBatch], agree: Agree, reach: Reach
    ) -> None:
        self.number, self.micro_batches = number, list(micro_batches)
        self.agree, self.reach = agree, reach
        self.current: MicroBatch | None = None
        self.begun = 0  # micro-batches
        self.passes = 0  # over them: each optimizer may want one
        self.loss: torch.Tensor | float = 0.0
        self.terms = TermCounts()
        self.before: Versions = {}  # of gradients, when the first micro-batch was given
        self.made: Versions = {}  # of gradients, after the last backward
        self.probe: torch.Tensor | None = None  # of gradients that are cut, then
        self.cleared: list[torch.Tensor | bool] = []  # whether earlier micro-batches' were changed
        self.told = 0  # losses, since the last agreement
        self.named = 0  # micro-batches with named metrics
        self.divided = False  # losses came as parts of the mean
        self.divisor = 1  # of the others, before it is known how many terms there are
        self.meant = (0, 0)  # the pass and micro-batch of which a mean came last
        self.agreed = False
        self.is_compared = False  # the loss of the global batch's first micro-batch
        self.compared: list[torch.Tensor | float] = []  # that loss, each time that it was made
        self.ratio = 1.0  # by which gradients are multiplied to be means over all terms
        self.scaled = False
        self.norm: float | None = None  # of the global gradient, once agreed


def terms_in(data: Any) -> int | None:
    """How many targets a micro-batch seems to have: its labels, or elements of its first tensor.

    What is last in a tuple is taken for labels where some of it are left out by IGNORED_LABEL."""
    if isinstance(data, Mapping):
        labels = data.get("labels")
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            return int((labels != IGNORED_LABEL).sum())
        data = list(data.values())
    if isinstance(data, (tuple, list)):
        if (
            len(data) > 1
            and isinstance(last := data[-1], torch.Tensor)
            and last.dtype == torch.long
        ):
            kept = int((last != IGNORED_LABEL).sum())
            if kept < last.numel():
                return kept
        return next((n for item in data if (n := terms_in(item)) is not None), None)
    return data.numel() if isinstance(data, torch.Tensor) else None


def check_alike(data: Any, alike: int | None) -> int | None:
    """How many targets micro-batches have: ``data``'s, and ``alike`` if any were seen before.

    Raises ConfigError where they differ: a mean of means is no mean then.
    """
    found = terms_in(data)
    if alike is not None and found != alike:
        raise ConfigError(
            f"ctx.backward: a mean without its count weighs all micro-batches alike, and they "
            f"have {alike} and {found} targets: give the sum and the count of its terms, or a "
            "count of 1 where each micro-batch is to weigh the same"
        )
    return found
