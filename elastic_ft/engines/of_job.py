"""What the engines have in common that make a job's own model: native, and DeepSpeed's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from elastic_ft.config import Job
from elastic_ft.core.sharding import Box
from elastic_ft.engines.along import Along
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.loss_scale import LossScale
from elastic_ft.engines.modules import DTYPES, FirstGradients, TermCounts, to_device
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import initial_parts
from elastic_ft.models.loss import loss_and_named
from elastic_ft.models.named import NamedSums, fetched
from elastic_ft.state.tensors import LocalState, tensor_name


class EngineOfJob:
    """Args:
    model_factory: makes the whole model, on the device that torch's context names.
    tokens_per_sample: of each of the loss's terms; losses and gradients are means over them.
    """

    def __init__(
        self,
        job: Job,
        model_factory: Callable[[], nn.Module],
        device: torch.device,
        tokens_per_sample: int,
    ) -> None:
        self.job, self.device, self._factory = job, device, model_factory
        self._nominal_tokens = tokens_per_sample * job.batch.global_batch_size
        self._compute_dtype = DTYPES[job.precision.dtype]
        self._computed: dict[str, torch.Tensor] = {}  # buffers
        self._groups: Groups | None = None  # attached
        self._loss_scale, self._first_gradients = LossScale(job), FirstGradients()
        self.base_digest: str | None = None
        self.along: Along | None = None  # attached
        self.intact, self.named, self.experts = True, NamedSums(), 0

    def _initialise_from_seed(self, state: LocalState) -> None:
        targets: dict[tuple[str, Box], torch.Tensor] = {}
        wanted: dict[str, list[Box]] = {}
        for key, target in state.items():
            if key.startswith("model."):
                name = tensor_name(key).removeprefix("model.")
                wanted.setdefault(name, []).append(target.box)
                targets[name, target.box] = target.local
        for name, box, part in initial_parts(self._factory, self.job.seed, wanted):
            targets[name, box].copy_(part)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self._compute_dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute_dtype)

    def _evaluated(
        self, model: nn.Module, micro_batches: Iterable[MicroBatch], sums: NamedSums
    ) -> tuple[float, int]:
        """The loss's sum and terms; what is named goes into ``sums``."""
        total: torch.Tensor | float = 0.0
        tokens = TermCounts()
        for micro_batch in micro_batches:
            loss, count, found = loss_and_named(model, to_device(micro_batch.data, self.device))
            sums.add(found, micro_batch.weight)
            if micro_batch.weight:
                total = total + loss.double()
                tokens.add(count)
        told, terms = fetched([total, tokens.queued()])
        return told, int(terms)

    def _check_said(self) -> None:
        """Of what had collectives in it: an abort would have left anything in their results. Raises
        GroupBroken."""
        assert self._groups is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._groups.check()
