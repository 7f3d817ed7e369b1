"""One step of training, as a loop sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """What a train loop sees of one step.

    A step is yielded once all members have applied it. If its state does not survive a failure it
    is run, and yielded, again.
    """

    number: int
    loss: float  # mean per token (or per term) over the global batch
    learning_rate: float
    grad_norm: float
    tokens: int
    step_time_s: float
    generation: int
    world_size: int
    rank: int
    eval_loss: float | None = None
    checkpointed: bool = False  # a checkpoint of this step has been started
    last: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # named, means as of the loss
