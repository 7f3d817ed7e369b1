"""DDP, HSDP, FSDP2, tensor and pipeline parallelism over a DeviceMesh, in plain PyTorch.

Where every rank has the whole state (DDP), module and optimizer are kept across generations and
only re-wrapped; what is cut is laid out anew (``engines.laid_out``), and filled in.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.engines import gradients, laid_out
from elastic_ft.engines.along import run_backward
from elastic_ft.engines.averaged import averaged
from elastic_ft.engines.base import BatchSums, MicroBatch, Update
from elastic_ft.engines.by_reference import Reference
from elastic_ft.engines.compiling import Compiler, eagerly
from elastic_ft.engines.expert_parallel import experts_of_each, is_shared_out, runs_of_experts
from elastic_ft.engines.float8 import converting
from elastic_ft.engines.from_folder import read_weights
from elastic_ft.engines.laid_out import LaidOut
from elastic_ft.engines.learning_rates import learning_rate, set_rates
from elastic_ft.engines.modules import (
    TermCounts,
    same_objects,
    seed_for,
    to_device,
)
from elastic_ft.engines.muon import MuonWithAdamW
from elastic_ft.engines.of_job import EngineOfJob
from elastic_ft.engines.optimizers import LOCAL_OPTIMIZERS, warm_optimizer
from elastic_ft.engines.pipeline import micro_batches_to_run, run_watched
from elastic_ft.engines.shared_positions import check_kernels
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.waits import WAITS
from elastic_ft.models.build import computed_buffers
from elastic_ft.models.loss import loss_and_named
from elastic_ft.models.named import NamedSums, fetched
from elastic_ft.state.tensors import LocalState, StateTensor, keyed


class NativeEngine(EngineOfJob):
    """A job's model in plain PyTorch; see ``Engine`` for what each method does.

    It is in one of four states:

    - *bare*: there is no model. As it is made, and after a generation whose model was cut.
    - *attached*, from ``attach`` to ``detach``: a model laid out over the world's groups, and what
      forward goes through.
    - *kept*, after a generation in which every rank had all (DDP): module and optimizer stay, with
      nothing that is bound to groups. The next ``attach`` of such a layout only wraps them again.
    - *left*: a thread is inside the model for good. What it uses belongs to it, this is bare.
    """

    can_be_left = True

    def __init__(
        self,
        job: Job,
        model_factory: Callable[[], nn.Module],
        device: torch.device,
        tokens_per_sample: int,
    ) -> None:
        factory = converting(job, device, model_factory, tokens_per_sample)
        super().__init__(job, factory, device, tokens_per_sample)
        self._sequence_length = tokens_per_sample
        self._laid_out: LaidOut | None = None  # attached or kept
        self._replicated = False  # every rank has all of it
        self._runner: nn.Module | None = None  # what forward goes through; attached
        self._told_last: bool | None = None  # what FSDP2's modules know of the micro-batch
        self._listed: tuple[dict[str, torch.Tensor], LocalState] | None = None
        self._settled = False  # FSDP2's first forward may move its parameters
        self._compiler: Compiler | None = None  # as the job wishes; prepared
        self.reference: Reference | None = None  # prepared

    # ------------------------------------------------------------------ layout

    def prepare(self) -> None:
        torch_private.forget_meshes()  # imports what the first teardown needs
        with torch.device("meta"):
            laid_out.check_parallel(self.job, model := self._factory(), self._sequence_length)
            self.experts = experts_of_each(model)
            check_kernels(self.job, self.device)
            if self.job.model.lora is not None:
                self.reference = Reference(str(self.job.model.weights), self._factory())
        self._computed = computed_buffers(self._factory)
        warm_optimizer(self.job.optimizer)
        if self.job.parallel.compile:
            self._compiler = Compiler(self.job, self.device)
            self._compiler.warm_up(self._factory, laid_out.to_compile(self.job, self.device))

    def keeps(self, layout: Layout) -> bool:
        whole = laid_out.is_replicated(self.job, layout, self.device)
        return whole and self._replicated and self._laid_out is not None

    def attach(self, groups: Groups) -> bool:
        layout = groups.assignment.layout
        self._groups = groups
        kept = self.keeps(layout)
        replicated = laid_out.is_replicated(self.job, layout, self.device)
        if replicated:
            if not kept:
                self._lay_out(None)
            self._runner, self.along = laid_out.wrapped(self._model, groups, self.device)
        else:
            assert groups.mesh is not None
            for group in groups.of_world():
                torch_private.set_group_timeout(group, groups.operation_timeout_s)
            self._lay_out(groups)
            self._runner = self._model.parts[0]
        self._replicated = replicated
        self._model.replicas.attach(groups)
        if self.reference is not None:
            self.reference.laid_out(self._frozen_parts(), in_place=kept)
        self._listed, self._settled, self._told_last = None, False, None
        return kept

    def _lay_out(self, groups: Groups | None) -> None:
        self._laid_out, of = None, (self.job, self._factory, self._computed, self.device)
        if self._compiler is not None:
            self._compiler.begin_layout()
        self._laid_out = laid_out.lay_out(*of, groups)
        self.named.tally = self._laid_out.balancing

    @property
    def _model(self) -> LaidOut:
        assert self._laid_out is not None, "attach comes first"
        return self._laid_out

    def detach(self, in_use: list[object] | None = None) -> LocalState:
        # What a step that broke off has left can't be listed: all is made anew.
        whole = self._laid_out is not None and self._laid_out.kept.whole
        state = self.state() if whole else {}
        unfilled = self.reference is not None and not self.reference.in_place
        self._replicated = self._replicated and whole and in_use is None and not unfilled
        if self.reference is not None:
            self.reference.left(self._frozen_parts, self._groups)
        WAITS.forget()  # what a thread that is left behind still uses is asked nothing more
        runner, self._runner, self._groups, self.along = self._runner, None, None, None
        if in_use is not None:
            in_use += [runner, self._laid_out]
        elif self._laid_out is not None:
            for parameter in self._laid_out.parameters.values():
                parameter.grad = None
        if in_use is None and isinstance(runner, DistributedDataParallel):
            # The reducer's hooks sit on the parameters we keep: it must go now, not at some gc.
            runner.reducer = None
            runner.logger = None
        if not self._replicated:
            self._laid_out = None
        self._listed = None
        return state

    # ------------------------------------------------------------------- state

    def _frozen_parts(self) -> LocalState:
        """Of weights that are no state. A first forward may have moved what is cut."""
        named, names = self._model.parameters, self.reference.names if self.reference else ()
        return {f"model.{name}": state_tensor(named[name]) for name in names}

    def state(self) -> LocalState:
        """Listed anew when a tensor has been replaced, as some optimizers do with theirs."""
        sources = dict(self._sources())
        if self._listed is None or not same_objects(sources, self._listed[0]):
            volatile = {f"model.{name}" for name in self._model.buffers}
            listed = keyed(
                (name, replace(piece, volatile=name in volatile))
                for name, tensor in sources.items()
                for piece in self._pieces(tensor)
            )
            self._listed = sources, listed
        return self._listed[1]

    def _pieces(self, tensor: torch.Tensor) -> Iterable[StateTensor]:
        """What this rank has of a tensor: of experts that are shared out, each run of them."""
        layout = Layout() if self._groups is None else self._groups.assignment.layout
        whole = state_tensor(tensor)
        return runs_of_experts(tensor, whole, layout) if is_shared_out(tensor) else [whole]

    def _sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        model, frozen = self._model, self.reference.names if self.reference else ()
        for name, master in model.masters.items():
            if name in frozen:
                continue
            yield f"model.{name}", master
            for key, value in model.kept.of(name):
                yield f"optim.{name}.{key}", value
        for name, value in model.kept.of_groups():
            yield f"engine.{name}", value
        for name, buffer in model.buffers.items():
            yield f"model.{name}", buffer
        yield from model.replicas.sources()
        yield from self._loss_scale.state.items()

    def initialise(self) -> None:
        state = self.state()
        with torch.no_grad():
            if self.job.model.weights is not None and self.reference is None:
                assert self._groups is not None
                of = (self.job, self.base_digest, self._groups, self._factory)
                read_weights(*of, [state])
            else:
                self._initialise_from_seed(state)
            self._model.kept.clear()
        self._model.replicas.clear()
        self._loss_scale.reset()

    def restored(self) -> None:
        self._loss_scale.restored()
        self._listed = None
        self._model.kept.restored()
        self._model.refresh()

    # ---------------------------------------------------------------- training

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._laid_out.blocks if self._laid_out is not None else []

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        """FSDP2 gathers parameters in every forward: all ranks run as many, padded if need be."""
        if self._model.pipeline is not None:
            assert self._groups is not None
            ranks = self._groups.assignment.layout.pipeline_size
            return micro_batches_to_run(max(dealt), ranks, self.job.parallel.schedule)
        return 0 if self._replicated else max(dealt)

    def run_batch(self, step: int, micro_batches: Sequence[MicroBatch], reach: Reach) -> BatchSums:
        assert self._groups is not None and self._runner is not None
        # Gradients are averaged over ranks: the factor makes their sum the mean over tokens.
        ranks = self._groups.assignment.layout.gradient_size
        factor = ranks / self._nominal_tokens * self._loss_scale.factor
        total: torch.Tensor | float = 0.0
        tokens, model = TermCounts(), self._model
        self.named.begin()
        self._watch_first_gradients(reach)
        if model.pipeline is not None:
            of = (model.pipeline, step, micro_batches, factor, model.blocks[-1], reach)
            return self._sums(*run_watched(*of))
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            seed_for(self.job.seed, step, micro_batch.number)
            reach("forward", None if index == 0 else step)
            self._model.balancing.counts(micro_batch.weight)
            kept = {} if micro_batch.weight else {b: b.clone() for b in model.buffers.values()}
            with self._accumulating(last), self._autocast():
                loss, count, found = loss_and_named(
                    self._runner, to_device(micro_batch.data, self.device, copied=True)
                )
                if index == 0:
                    reach("backward")
                self.named.add(found, micro_batch.weight)
                if micro_batch.weight:
                    total = total + loss.detach().double()
                    tokens.add(count)
                scaled = loss * (factor * micro_batch.weight)
                run_backward(scaled, self.along if last else None, total, tokens)
            for buffer, before in kept.items():  # padding is no sample: running statistics, say
                buffer.copy_(before)
        return self._sums(total, tokens.queued())

    def _counts(self, named: NamedSums) -> bool:
        """Tensor-parallel peers have the same loss: one of them counts it."""
        if not self._settled:
            self._listed, self._settled = None, True
        assert self._groups is not None and self._groups.rank is not None
        counts = self._groups.assignment.layout.counts_loss(self._groups.rank)
        if not counts:
            named.leave_out()
        return counts

    def _accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around each micro-batch: what can wait for a step's last one is not sent before."""
        if isinstance(self._runner, DistributedDataParallel) and not last:
            return self._runner.no_sync()
        if isinstance(self._runner, FSDPModule) and last is not self._told_last:
            self._told_last, parallel = last, self.job.parallel
            self._runner.set_reshard_after_backward(last or parallel.reshard_after_backward)
            self._runner.set_requires_gradient_sync(last or parallel.reduce_gradients != "step")
            self._runner.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self._cast() if self._replicated else contextlib.nullcontext()

    def _watch_first_gradients(self, reach: Reach) -> None:
        model, last = self._model, None
        if self._replicated:
            last = next(p for p in reversed(model.parameters.values()) if p.requires_grad)
        self._first_gradients.watch(reach, model.blocks, last)

    def _sums(self, loss: torch.Tensor | float, terms: torch.Tensor | int) -> BatchSums:
        """Of a batch whose backward is queued. The norm is queued behind it, and then all is asked
        for at once: whatever waits for the device before leaves it idle for as long."""
        assert self._groups is not None
        model, layout = self._model, self._groups.assignment.layout
        found = gradients.reduced(model)
        gradients.check_reduced(model, self._runner, layout.dp_replicate)
        model.replicas.reduce()
        if self._replicated:
            norm = torch.nn.utils.get_total_norm(found)
        else:
            norm = gradients.squares_of_shards(found, layout, model.tied)
        counts = self._counts(self.named)
        if self.along is not None and self.along.is_told:  # who has come so far makes the step (I4)
            (whole,) = fetched([norm])
            return BatchSums(0.0, 0, whole * whole)
        loss, terms = (loss, terms) if counts else (0.0, 0)
        share, total, count, *named = fetched([norm, loss, terms, *self.named.queued()])
        self._groups.check()  # the device is done: with what it was to do, or with an abort
        if self._replicated:  # all have the same: one of them counts it
            share = share * share if self._groups.rank == 0 else 0.0
        return BatchSums(total, int(count), share, named)

    def apply(self, step: int, tokens: int, squares: float, reach: Reach) -> Update:
        model, optimizer = self._model, self._model.optimizer
        reach("before_optimizer")
        ratio = self._nominal_tokens / max(tokens, 1) / self._loss_scale.factor
        norm = math.sqrt(squares) * ratio
        update = Update(norm)
        if math.isfinite(norm):
            found, clip = gradients.present(model), self.job.optimizer.grad_clip
            gradients.scale(found, norm, ratio, clip)
            rate = learning_rate(self.job.optimizer, self.job.steps, step)
            set_rates(optimizer, rate)
            if isinstance(optimizer, MuonWithAdamW):
                optimizer.gather()
                self._check_said()
            self.intact = False
            if model.kept.fresh:  # their first step replaces what is listed
                self._listed = None
            model.step(reach)
            if not self._replicated and self.job.optimizer.name not in LOCAL_OPTIMIZERS:
                self._check_said()
            self.intact = True
            self._loss_scale.applied()
        else:
            update = self._loss_scale.skipped(step, norm)
        if self._compiler is not None:
            update = replace(update, compiled=self._compiler.take())
        model.drop_gradients()
        return update

    def share_residuals(self, progress: Callable[[], None]) -> None:
        self._model.replicas.share(self._check_said, progress)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int, NamedSums]:
        parts, pipeline = self._model.parts, self._model.pipeline
        sums = NamedSums()
        for part in parts:
            part.eval()
        at = averaged if self.job.optimizer.is_schedule_free else contextlib.nullcontext
        try:
            with at(self._model), torch.no_grad(), self._autocast(), eagerly(self._compiler):
                if pipeline is not None:
                    found = pipeline.evaluate(micro_batches)
                else:
                    found = self._evaluated(parts[0], micro_batches, sums)
        finally:
            for part in parts:
                part.train()
        return (*(found if self._counts(sums) else (0.0, 0)), sums)


# ------------------------------------------------------------------------------- helpers


def state_tensor(tensor: torch.Tensor) -> StateTensor:
    tensor, shape = tensor.detach(), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return StateTensor(shape, Box.whole(shape), tensor)
    sizes, offsets = torch_private.local_shape_and_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return StateTensor(shape, Box(offsets, sizes), tensor.to_local())
