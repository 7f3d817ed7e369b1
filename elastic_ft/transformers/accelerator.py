"""Accelerate's ``Accelerator`` as a trainer's that has the world from elsewhere.

It believes in one process, for which it neither wraps a model nor shards a loader. What goes over
ranks is the context's: the backward of a part of the mean, the global gradient's norm, and in
evaluation what is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from elastic_ft.training.context import Context
from elastic_ft.transformers.evaluation import DealtBatches


class ElasticAccelerator(Accelerator):
    """Made of an ``Accelerator`` by ``adopt``.

    Attributes:
        of: terms in the global batch that is trained on; ``count``: in the micro-batch.
        rounds: of an evaluation that is dealt over ranks, while there is one.
    """

    context: Context
    of: int
    count: int
    rounds: DealtBatches | None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.context.backward(loss, self.count, of=self.of)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> Any:
        """All ranks agree on the step here. Whole gradients are clipped as the stock does it."""
        if self.context.job.parallel.strategy != "ddp":
            return self.context.clip_grad_norm_(max_norm)
        self.context.clip_grad_norm_(math.inf)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def gather(self, tensor: Any) -> Any:
        """TRL's trainers gather some of what they log by this."""
        return super().gather(tensor) if self.rounds is None else self.rounds.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self.rounds is not None:
            return self.rounds.gather(input_data)
        if self.context.running_step:
            return input_data  # of this rank's micro-batch: put together once the step is made
        return super().gather_for_metrics(input_data, use_gather_object)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        if self.rounds is not None:
            return self.rounds.pad(tensor, dim, pad_index)
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)


def make_elastic(accelerator: Accelerator, context: Context) -> ElasticAccelerator:
    """The same object, as an ``ElasticAccelerator``: trainers and TRL's hold it in many places."""
    accelerator.__class__ = ElasticAccelerator
    assert isinstance(accelerator, ElasticAccelerator)
    accelerator.context, accelerator.rounds = context, None
    accelerator.of = accelerator.count = 1
    return accelerator
