"""DDP, HSDP, FSDP2, tensor and pipeline parallelism over a DeviceMesh, in plain PyTorch.

Where every rank has the whole state (DDP), module and optimizer are kept across generations and
only re-wrapped. What is cut can't be re-cut in place: the module is rebuilt on meta, cut over the
new mesh, and filled in. Data-parallel ranks of such a layout share gradients by FSDP2, replicas
of one shard too: HSDP, if need be with shards of one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.engines.base import MicroBatch, Update
from elastic_ft.engines.initial_weights import load as load_weights
from elastic_ft.engines.learning_rates import learning_rate, set_rates
from elastic_ft.engines.loss_scale import LossScale
from elastic_ft.engines.modules import (
    checkpoint_activations,
    inside,
    plain_name,
    remove_hooks,
    seed_for,
    to_device,
    to_empty,
)
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.optimizers import LOCAL_OPTIMIZERS, make_optimizer, warm_optimizer
from elastic_ft.engines.pipeline import (
    Pipeline,
    TiedWeight,
    check_pipeline,
    cut,
    micro_batches_to_run,
)
from elastic_ft.engines.tensor_parallel import check_tensor_parallel, parallelize
from elastic_ft.engines.unused import check_all_used, use_all
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import block_modules, computed_buffers, initial_parts
from elastic_ft.models.decoder import Decoder, DecoderStage
from elastic_ft.models.loss import loss_sum
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.storage.safetensors import open_folder

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NativeEngine:
    can_be_left = True

    def __init__(
        self,
        job: Job,
        model_factory: Callable[[], nn.Module],
        device: torch.device,
        tokens_per_sample: int,
    ) -> None:
        self.job, self.device = job, device
        self._factory = model_factory
        self._sequence_length = tokens_per_sample
        self._nominal_tokens = tokens_per_sample * job.batch.global_batch_size
        self._compute_dtype = DTYPES[job.precision.dtype]
        self._parts: list[nn.Module] = []  # the bare model, or this rank's stages of it
        self._runner: nn.Module | None = None  # what forward goes through
        self._pipeline: Pipeline | None = None  # or this
        self._tied: TiedWeight | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._kept: OptimizerState | None = None  # by the optimizer
        self._parameters: dict[str, nn.Parameter] = {}
        self._trained = 0  # how many of them are
        self._blocks: list[nn.Module] = []
        self._reduce_announced = False
        self._reduce_hooks: list[Any] = []
        self._told_last: bool | None = None  # what FSDP2's modules know of the micro-batch
        self._buffers: dict[str, torch.Tensor] = {}
        self._loss_scale = LossScale(job)
        self._replicated = False
        self._listed: tuple[dict[str, torch.Tensor], LocalState] | None = None
        self._settled = False  # FSDP2's first forward may move its parameters
        self._groups: Groups | None = None
        self._computed: dict[str, torch.Tensor] = {}
        self.intact = True

    # ------------------------------------------------------------------ layout

    def prepare(self) -> None:
        torch_private.forget_meshes()  # imports what the first teardown needs
        with torch.device("meta"):
            check_parallel(self.job, self._factory(), self._sequence_length)
        self._computed = computed_buffers(self._factory)
        warm_optimizer(self.job.optimizer)

    def attach(self, groups: Groups) -> bool:
        layout = groups.assignment.layout
        self._groups = groups
        replicated = len(layout.shards()) == 1 and not self._is_cut_alone(layout)
        kept = replicated and self._replicated and bool(self._parts)
        if replicated:
            if not kept:
                self._build(None)
            self._wrap_replicated()
        else:
            assert groups.mesh is not None
            for name in groups.mesh.mesh_dim_names or ():
                torch_private.set_group_timeout(
                    groups.mesh.get_group(name), groups.operation_timeout_s
                )
            self._build(groups)
        self._replicated = replicated
        self._listed, self._settled, self._told_last = None, False, None
        return kept

    def detach(self, in_use: list[object] | None = None) -> LocalState:
        # What a step that broke off has left can't be listed: all is made anew.
        whole = self._kept is not None and self._kept.whole
        state = self.state() if whole else {}
        self._replicated = self._replicated and whole
        runner, self._runner, self._groups = self._runner, None, None
        if in_use is not None:
            in_use += [runner, self._parts, self._pipeline, self._tied, self._optimizer]
            self._replicated = False
        else:
            for parameter in self._parameters.values():
                parameter.grad = None
        if in_use is None and isinstance(runner, DistributedDataParallel):
            # The reducer's hooks sit on the parameters we keep: it must go now, not at some gc.
            runner.reducer = None
            runner.logger = None
        if not self._replicated:
            self._parts, self._pipeline, self._tied = [], None, None
            self._optimizer = self._kept = None
            self._parameters, self._buffers, self._blocks = {}, {}, []
        self._listed = None
        return state

    def _build(self, groups: Groups | None) -> None:
        """A fresh module and optimizer, cut over ``groups`` if given, uninitialised."""
        with torch.device("meta"):
            module = self._factory()
        stages = _cut(self.job, module, groups)
        self._parts = list(stages.values())
        self._blocks = [block for part in self._parts for block in self._prepare_part(part, groups)]
        named = dict(_chain(part.named_buffers() for part in self._parts))
        for name, value in self._computed.items():
            named[name].copy_(value)
        self._parameters = _parameters(self._parts)
        self._trained = sum(p.requires_grad for p in self._parameters.values())
        persistent = {plain_name(name) for part in self._parts for name in part.state_dict()}
        self._buffers = {name: buffer for name, buffer in named.items() if name in persistent}
        make = partial(make_optimizer, self.job.optimizer)
        staged = groups is not None and groups.assignment.layout.pp > 1
        self._kept = OptimizerState(make, self._parameters, staged=staged)
        self._optimizer = self._kept.optimizer
        self._runner = self._parts[0]
        if groups is not None and groups.assignment.layout.pp > 1:
            assert groups.mesh is not None
            group, schedule = groups.mesh.get_group("pp"), self.job.parallel.schedule
            if cast("Decoder", module).config.tie_embeddings:
                self._tied = TiedWeight(stages, group, schedule)
            self._pipeline = Pipeline(
                cast("dict[int, DecoderStage]", stages),
                group,
                schedule,
                groups.assignment.layout.tp,
                self._compute_dtype,
                self.device,
            )

    def _prepare_part(self, part: nn.Module, groups: Groups | None) -> Sequence[nn.Module]:
        """Shares out a part of the model on meta, and allocates it. Returns its blocks."""
        if groups is not None and groups.assignment.layout.tp > 1:
            assert groups.mesh is not None
            parallelize(part, groups.mesh["tp"], self.job.parallel.tp_plan)
        blocks = [*part.layers.values()] if isinstance(part, DecoderStage) else block_modules(part)
        if self.job.parallel.activation_checkpointing:
            blocks = checkpoint_activations(part, blocks)
        if groups is not None and self._needs_fsdp(groups.assignment.layout):
            self._shard(part, blocks, groups)
        to_empty(part, self.device)
        if self.job.parallel.unused_parameters:
            use_all(part, [] if groups is None else blocks)
        return blocks

    def _needs_fsdp(self, layout: Layout) -> bool:
        """For gradients of several data ranks, or for compute in another dtype."""
        larger = layout.data_parallel_size > 1 or self._compute_dtype is not torch.float32
        return larger or self._is_cut_alone(layout)

    def _is_cut_alone(self, layout: Layout) -> bool:
        """A world of one, to compute as larger ones of its job do: FSDP2's bf16 is no autocast."""
        is_plain = self._compute_dtype is torch.float32 and self.device.type == "cpu"
        is_cut = self.job.parallel.strategy in ("fsdp", "hsdp")
        return layout.world_size == 1 and is_cut and not is_plain

    def _shard(self, module: nn.Module, blocks: Sequence[nn.Module], groups: Groups) -> None:
        layout, mesh = groups.assignment.layout, groups.mesh
        assert mesh is not None
        names = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        if layout.tp > 1:  # logits are a view of a DTensor's; nothing here writes to them
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        policy = MixedPrecisionPolicy()
        if self._compute_dtype is not torch.float32:
            policy = MixedPrecisionPolicy(
                param_dtype=self._compute_dtype, reduce_dtype=torch.float32
            )
        for block in [*blocks, module]:
            fully_shard(
                block,
                mesh=mesh[names],
                mp_policy=policy,
                # A pipeline's micro-batches come in turns: gathering anew for each costs more.
                reshard_after_forward=None if self._gathers_often(layout) else False,
            )

    def _gathers_often(self, layout: Layout) -> bool:
        return layout.pp == 1 and self.job.parallel.reshard_after_backward

    def _wrap_replicated(self) -> None:
        (module,) = self._parts
        self._runner = DistributedDataParallel(
            module,
            init_sync=False,  # the state comes through the transfer
            gradient_as_bucket_view=True,
            **torch_private.buffer_sync(bool(self._buffers)),
        )

    # ------------------------------------------------------------------- state

    def state(self) -> LocalState:
        """Listed anew when a tensor has been replaced, as some optimizers do with theirs."""
        sources = dict(self._sources())
        if self._listed is None or not _same_objects(sources, self._listed[0]):
            volatile = {f"model.{name}" for name in self._buffers}
            listed = {
                name: replace(_state_tensor(tensor), volatile=name in volatile)
                for name, tensor in sources.items()
            }
            self._listed = sources, listed
        return self._listed[1]

    def _sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._kept is not None
        for name, parameter in self._parameters.items():
            yield f"model.{name}", parameter
            for key, value in self._kept.of(name):
                yield f"optim.{name}.{key}", value
        for name, value in self._kept.of_groups():
            yield f"engine.{name}", value
        for name, buffer in self._buffers.items():
            yield f"model.{name}", buffer
        yield from self._loss_scale.state.items()

    def initialise(self) -> None:
        state = self.state()
        with torch.no_grad():
            if self.job.model.weights is not None:
                self._load_weights(self.job.model.weights, state)
            else:
                self._initialise_from_seed(state)
            assert self._kept is not None
            self._kept.clear()
        self._loss_scale.reset()

    def _load_weights(self, url: str, state: LocalState) -> None:
        with torch.device("meta"):
            model = self._factory()
        _, remarks = load_weights(open_folder(url), model, state)
        if self._groups is not None and self._groups.rank == 0:
            for remark in remarks:
                log.warning(remark)

    def _initialise_from_seed(self, state: LocalState) -> None:
        wanted = {
            name.removeprefix("model."): [target.box]
            for name, target in state.items()
            if name.startswith("model.")
        }
        for name, _, part in initial_parts(self._factory, self.job.seed, wanted):
            state[f"model.{name}"].local.copy_(part)

    def restored(self) -> None:
        self._loss_scale.restored()
        self._listed = None
        assert self._kept is not None
        self._kept.restored()
        if self._tied is not None:
            self._tied.refresh()

    # ---------------------------------------------------------------- training

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        """FSDP2 gathers parameters in every forward: all ranks run as many, padded if need be."""
        if self._pipeline is not None:
            assert self._groups is not None
            pp = self._groups.assignment.layout.pp
            return micro_batches_to_run(max(dealt), pp, self.job.parallel.schedule)
        return 0 if self._replicated else max(dealt)

    def run_batch(
        self, step: int, micro_batches: Sequence[MicroBatch], reach: Reach
    ) -> tuple[float, int]:
        assert self._groups is not None and self._runner is not None
        # Gradients are averaged over ranks: the factor makes their sum the mean over tokens.
        ranks = self._groups.assignment.layout.data_parallel_size
        factor = ranks / self._nominal_tokens * self._loss_scale.factor
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self._reach_in_backward(reach)
        if self._pipeline is not None:
            return self._run_pipeline(step, self._pipeline, micro_batches, factor, reach)
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            seed_for(self.job.seed, step, micro_batch.number)
            reach("forward", None if index == 0 else step)
            kept = {} if micro_batch.weight else {b: b.clone() for b in self._buffers.values()}
            with self._accumulating(last), self._autocast():
                loss, count = loss_sum(self._runner, to_device(micro_batch.data, self.device))
                if index == 0:
                    reach("backward")
                (loss * (factor * micro_batch.weight)).backward()
            for buffer, before in kept.items():  # padding is no sample: running statistics, say
                buffer.copy_(before)
            if micro_batch.weight:
                total += loss.detach().double()
                tokens += int(count)
        return self._counted(float(total), tokens)

    def _run_pipeline(
        self,
        step: int,
        pipeline: Pipeline,
        micro_batches: Sequence[MicroBatch],
        factor: float,
        reach: Reach,
    ) -> tuple[float, int]:
        passed = 0

        def left(block: nn.Module, args: Any, output: torch.Tensor) -> None:
            nonlocal passed
            passed += 1
            if passed == 1:
                output.register_hook(lambda _: reach("backward"))
            else:
                reach("forward", step)

        reach("forward")
        handle = self._blocks[-1].register_forward_hook(left)
        try:
            found = pipeline.run(micro_batches, factor)
        finally:
            handle.remove()
        return self._counted(*found)

    def _counted(self, loss: float, tokens: int) -> tuple[float, int]:
        """Tensor-parallel peers have the same loss: one of them counts it."""
        if not self._settled:
            self._listed, self._settled = None, True
        assert self._groups is not None and self._groups.rank is not None
        *_, tp = self._groups.assignment.layout.coordinates(self._groups.rank)
        return (loss, tokens) if tp == 0 else (0.0, 0)

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
        if self._replicated and self._compute_dtype is not torch.float32:
            return torch.autocast(self.device.type, dtype=self._compute_dtype)
        return contextlib.nullcontext()

    def _reach_in_backward(self, reach: Reach) -> None:
        """Announces "reduce" once per step: when the first gradients are complete."""
        handles = self._reduce_hooks
        remove_hooks(handles)  # of a step in which nothing arrived

        def arrived(_: Any) -> None:
            remove_hooks(handles)
            if not self._reduce_announced:
                self._reduce_announced = True
                reach("reduce")

        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    handles.append(value.register_hook(arrived))
                    return

        self._reduce_announced = False
        if self._replicated:
            trained = [p for p in self._parameters.values() if p.requires_grad]
            handles.append(trained[-1].register_hook(arrived))
        elif self._blocks:  # FSDP2's parameters get their gradients past autograd
            hook = self._blocks[-1].register_forward_pre_hook(entered, with_kwargs=True)
            handles.append(hook)

    def square_norm(self) -> float:
        assert self._groups is not None
        gradients = self._reduced_gradients()
        self._check_reduced(all_present=len(gradients) == self._trained)
        if self._replicated:  # all have the same: one of them counts it
            norm = float(torch.nn.utils.get_total_norm(gradients))
            squares = norm * norm if self._groups.rank == 0 else 0.0
        else:
            norms = torch._foreach_norm([_local(g) for g in gradients])
            replicas = torch.tensor([self._replicas(g) for g in gradients], device=self.device)
            squares = float((torch.stack(norms).double() ** 2 / replicas).sum())
        self._groups.check()  # the device is done: with what it was to do, or with an abort
        return squares

    def _check_reduced(self, *, all_present: bool) -> None:
        """Raises ConfigError if gradients of earlier micro-batches were not reduced, for want of
        one in the last. Nothing is looked for where that can't be."""
        assert self._groups is not None
        reduced = True
        if isinstance(self._runner, DistributedDataParallel):
            if not all_present:
                check_all_used(self._parameters)
            reduced = torch_private.is_reduced(self._runner)
        elif self._groups.assignment.layout.dp_replicate > 1 and not all_present:
            reduced = not any(
                map(torch_private.is_owed, self._parts)
            )  # the next step would have it
        if not reduced:
            raise ConfigError(
                "parallel.unused_parameters: a step's last micro-batch does not use all parameters "
                "on this rank; if samples need not, say true"
            )

    def apply(self, step: int, tokens: int, squares: float, reach: Reach) -> Update:
        assert self._optimizer is not None and self._kept is not None
        reach("before_optimizer")
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        ratio = self._nominal_tokens / max(tokens, 1) / self._loss_scale.factor
        norm = math.sqrt(squares) * ratio
        update = Update(norm)
        if math.isfinite(norm):
            self._scale_gradients(gradients, norm, ratio)
            rate = learning_rate(self.job.optimizer, self.job.steps, step)
            set_rates(self._optimizer, rate)
            self.intact = False
            if self._kept.fresh:  # their first step replaces what is listed
                self._listed = None
            with self._kept.stepping(), inside(reach):
                self._optimizer.step()
                if self._tied is not None:
                    self._tied.refresh()
            if not self._replicated and self.job.optimizer.name not in LOCAL_OPTIMIZERS:
                self._check_stepped()
            self.intact = True
            self._loss_scale.applied()
        else:
            update = self._loss_scale.skipped(step, norm)
        self._optimizer.zero_grad(set_to_none=True)
        return update

    def _check_stepped(self) -> None:
        """Of an optimizer whose step may have collectives, as norms of DTensors are: an abort
        would have left anything in its results. Raises GroupBroken."""
        assert self._groups is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._groups.check()

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's; of a replicated weight, tensor-parallel peers have parts of the sum."""
        for parameter in self._parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        if self._tied is not None:
            self._tied.sum_gradients()
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def _replicas(self, gradient: torch.Tensor) -> int:
        """How many ranks have the same part of it: all that no dimension of a mesh cuts it over."""
        assert self._groups is not None
        layout = self._groups.assignment.layout
        ranks = layout.data_parallel_size * layout.tp
        if self._tied is not None:
            ranks *= self._tied.copies(gradient)
        if not isinstance(gradient, DTensor):
            return ranks
        mesh, placed = gradient.device_mesh, enumerate(gradient.placements)
        cuts = (mesh.size(dim) for dim, placement in placed if not placement.is_replicate())
        return ranks // math.prod(cuts)

    def _scale_gradients(self, gradients: list[torch.Tensor], norm: float, ratio: float) -> None:
        clip = self.job.optimizer.grad_clip
        factor = ratio * (min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0)
        if factor != 1.0:
            torch._foreach_mul_([_local(g) for g in gradients], factor)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        (first, *_), pipeline = self._parts, self._pipeline
        total, tokens = 0.0, 0
        for part in self._parts:
            part.eval()
        try:
            with torch.no_grad(), self._autocast():
                if pipeline is not None:
                    return self._counted(*pipeline.evaluate(micro_batches))
                for micro_batch in micro_batches:
                    loss, count = loss_sum(first, to_device(micro_batch.data, self.device))
                    if micro_batch.weight:
                        total += float(loss)
                        tokens += int(count)
        finally:
            for part in self._parts:
                part.train()
        return self._counted(total, tokens)


# ------------------------------------------------------------------------------- helpers


def check_parallel(job: Job, model: nn.Module, sequence_length: int | None) -> None:
    """Raises ConfigError for a model that can't be laid out as asked. ``model``: may be on meta."""
    parallel = job.parallel
    check_tensor_parallel(model, parallel.tp, sequence_length, parallel.tp_plan)
    check_pipeline(model, job.parallel.pp, job.parallel.schedule)


def _cut(job: Job, module: nn.Module, groups: Groups | None) -> Mapping[int, nn.Module]:
    """This rank's pipeline stages by number; without a pipeline, the whole model."""
    if groups is None or groups.assignment.layout.pp == 1:
        return {0: module}
    assert groups.rank is not None
    layout = groups.assignment.layout
    pp_rank, *_ = layout.coordinates(groups.rank)
    return cut(cast("Decoder", module), pp_rank, layout.pp, job.parallel.schedule)


def _parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """By the name that the whole model has for each; of a tied weight in two stages, one."""
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in _chain([part.named_parameters()]):
            tied = isinstance(part, DecoderStage) and part.config.tie_embeddings
            name = "embedding.weight" if tied and name == "output.weight" else name
            found.setdefault(name, parameter)
    return found


def _chain(named: Iterable[Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """With names as in the bare model."""
    return ((plain_name(name), value) for part in named for name, value in part)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same_objects(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(value is b[name] for name, value in a.items())


def _state_tensor(tensor: torch.Tensor) -> StateTensor:
    tensor, shape = tensor.detach(), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return StateTensor(shape, Box.whole(shape), tensor)
    sizes, offsets = torch_private.local_shape_and_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return StateTensor(shape, Box(offsets, sizes), tensor.to_local())


def all_reduce_sums(values: Iterable[float], device: torch.device) -> list[float]:
    """Sums each value over the world, in float64 on the CPU group."""
    packed = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(packed)
    return packed.tolist()
