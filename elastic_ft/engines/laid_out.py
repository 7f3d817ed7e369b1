"""A model laid out over the ranks of one world, as one of them has it: cut, allocated, not filled.

What is cut can't be re-cut in place: the module is rebuilt on meta and cut over the new mesh.
Data-parallel ranks of such a layout share gradients by FSDP2, replicas of one shard too: HSDP, if
need be with shards of one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic_ft.config import CommConfig, Job
from elastic_ft.core.layouts.layout import MODEL_DIMENSIONS, OF_LAYERS, Layout, plan_layout
from elastic_ft.engines.activations import keep_in_host_memory
from elastic_ft.engines.along import Along, along_of
from elastic_ft.engines.balancing import Balancing
from elastic_ft.engines.compiling import LayerForm, check_compiled, compiled_layers
from elastic_ft.engines.expert_parallel import check_expert_parallel, shard_experts
from elastic_ft.engines.float8 import check_float8
from elastic_ft.engines.modules import (
    DTYPES,
    in_ddp,
    inside,
    mixed_precision,
    plain_name,
    to_empty,
)
from elastic_ft.engines.offloaded import Offloaded
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.engines.pipeline import (
    ModelStage,
    Pipeline,
    TiedWeight,
    check_batch,
    check_pipeline,
    cut,
)
from elastic_ft.engines.replica_comm import ReplicaComm
from elastic_ft.engines.shard_comm import compress
from elastic_ft.engines.shared_positions import (
    check_context_parallel,
    share_of_positions,
    share_positions,
)
from elastic_ft.engines.tensor_parallel import (
    check_stages_cut_alike,
    check_tensor_parallel,
    parallelize,
)
from elastic_ft.engines.unused import use_all
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.waits import WAITS
from elastic_ft.models.build import block_modules
from elastic_ft.models.decoder import Decoder, DecoderStage
from elastic_ft.models.experts import MixtureDecoder

WORLDS_MAX = 64  # that are looked at for what their layers are


@dataclass(eq=False, slots=True)
class LaidOut:
    """Attributes:
    parts: the bare model, or this rank's stages of it.
    blocks: the repeated layers among them, in the order in which they run.
    parameters: by the name that the whole model has for each.
    masters: the same by name, as the optimizer steps them and as state: those themselves, or where
        the optimizer is offloaded, others in host memory that they are copies of.
    buffers: those that are part of the state, by such names.
    kept: by the optimizer.
    replicas: how they sum gradients, where that is not FSDP2's or DDP's matter.
    balancing: of experts, which go with the optimizer's step.
    pipeline, tied: where the model is cut into stages; ``tied`` where two have one weight.
    """

    parts: list[nn.Module]
    blocks: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    masters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    kept: OptimizerState
    offloaded: Offloaded | None = None
    replicas: ReplicaComm = field(default_factory=lambda: ReplicaComm(CommConfig(), {}))
    balancing: Balancing = field(default_factory=lambda: Balancing(()))
    pipeline: Pipeline | None = None
    tied: TiedWeight | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.kept.optimizer

    def step(self, reach: Reach) -> None:
        """The optimizer's, of gradients that are reduced, scaled and clipped."""
        if self.offloaded is not None:
            self.offloaded.take_gradients()
        with self.kept.stepping(), inside(reach):
            self.optimizer.step()
            self.balancing.apply()
            self.replicas.commit()
            self.refresh()

    def refresh(self) -> None:
        """What is made of the masters, after they have changed."""
        if self.offloaded is not None:
            self.offloaded.give_weights()
        if self.tied is not None:
            self.tied.refresh()

    def drop_gradients(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None


def lay_out(
    job: Job,
    factory: Callable[[], nn.Module],
    computed: Mapping[str, torch.Tensor],
    device: torch.device,
    groups: Groups | None,
) -> LaidOut:
    """A fresh module and optimizer, cut over ``groups`` if given, uninitialised.

    ``computed``: the buffers that the model computes as it is made, by name.
    """
    with torch.device("meta"):
        module = factory()
    stages = _cut(job, module, groups)
    parts = list(stages.values())
    blocks = [block for part in parts for block in _prepare(job, part, groups, device)]
    named = dict(_chain(part.named_buffers() for part in parts))
    for name, buffer in _chain(part.named_buffers() for part in parts):  # stages may share some
        if name in computed:
            buffer.copy_(computed[name])
    persistent = {plain_name(name) for part in parts for name in part.state_dict()}
    parameters, staged = _parameters(parts), groups is not None and _layout(groups).has_stages
    make = partial(make_optimizer, job.optimizer, fused=True)
    offloaded = Offloaded(parameters, device) if job.optimizer.offload is not None else None
    masters = parameters if offloaded is None else parameters | offloaded.masters
    kept = OptimizerState(make, masters, staged=staged)
    buffers = {name: buffer for name, buffer in named.items() if name in persistent}
    replicas, balancing = ReplicaComm(job.comm, parameters), Balancing(parts, module)
    laid_out = LaidOut(
        *(parts, blocks, parameters, {**masters}, buffers, kept, offloaded, replicas, balancing)
    )
    if groups is not None and staged:
        assert groups.mesh is not None
        group, schedule = groups.mesh.get_group("pp"), job.parallel.schedule
        of_rank = cast("dict[int, ModelStage]", stages)
        if any(stage.known_as for stage in of_rank.values()):
            laid_out.tied = TiedWeight(of_rank, group, schedule)
        laid_out.pipeline = Pipeline(
            of_rank,
            group,
            schedule,
            _layout(groups).tp,
            DTYPES[job.precision.dtype],
            device,
        )
    return laid_out


def wrapped(
    laid_out: LaidOut, groups: Groups, device: torch.device
) -> tuple[DistributedDataParallel, Along | None]:
    """DDP around a model that every rank has whole, and what can travel along with gradients."""
    (module,) = laid_out.parts
    along = None if laid_out.replicas.sums_by_itself else along_of(groups, device)
    make = partial(in_ddp, module, device, sync_buffers=bool(laid_out.buffers))
    runner = make() if along is None else along.wrap(module, make)
    laid_out.replicas.keep_ddp_from_summing(runner)
    return WAITS.watch(runner), along


def is_replicated(job: Job, layout: Layout, device: torch.device) -> bool:
    """Every rank has all of the state, and gradients are DDP's matter."""
    return not layout.is_cut and not is_cut_alone(job, layout, device)


def to_compile(job: Job, device: torch.device) -> list[LayerForm]:
    """What layers are in the largest worlds that the job may have, and in the smallest; each form
    once, that of the largest first."""
    found = []
    elastic, each = job.elastic, job.multiple_of
    worlds = range(elastic.max_workers // each * each, elastic.min_workers - 1, -each)
    for world in (*worlds[:WORLDS_MAX], *worlds[WORLDS_MAX:][-1:]):
        layout, _ = plan_layout(job.parallel.wish, world)
        whole = is_replicated(job, layout, device)
        sharded = not whole and _needs_fsdp(job, layout, device)
        mesh = layout if layout.cuts_layers else Layout()
        found.append(LayerForm(mesh, whole, sharded))
    return list(dict.fromkeys(found))


def is_cut_alone(job: Job, layout: Layout, device: torch.device) -> bool:
    """A world of one, to compute as larger ones of its job do: FSDP2's bf16 is no autocast."""
    is_plain = DTYPES[job.precision.dtype] is torch.float32 and device.type == "cpu"
    is_cut = job.parallel.strategy in ("fsdp", "hsdp")
    return layout.world_size == 1 and is_cut and not is_plain


def check_parallel(job: Job, model: nn.Module, sequence_length: int | None) -> None:
    """Raises ConfigError for a model that can't be laid out as asked. ``model``: may be on meta."""
    parallel = job.parallel
    if parallel.loss_chunk_tokens and not isinstance(model, Decoder):
        raise ConfigError(
            "parallel.loss_chunk_tokens: is of the built-in decoder (model.preset), found "
            f"{type(model).__name__}"
        )
    check_compiled(job, model)
    check_float8(job, model)
    if isinstance(model, MixtureDecoder) and parallel.engine != "native":
        raise ConfigError("parallel.engine: a mixture of experts (model.preset) is of native alone")
    check_context_parallel(model, parallel, parallel.tp)
    if job.optimizer.is_schedule_free and parallel.pp > 1:
        raise ConfigError(
            f"optimizer.name: {job.optimizer.name} counts for all parameters, and stages (pp) have "
            "some each"
        )
    check_expert_parallel(job, model)
    check_tensor_parallel(model, parallel.tp, sequence_length, parallel.tp_plan)
    check_pipeline(model, parallel.pp, parallel.schedule)
    if parallel.pp > 1 and (key := parallel.is_differentiated_once):
        raise ConfigError(f"parallel.{key}: not with schedule zero_bubble")
    if parallel.pp > 1 and parallel.tp > 1:
        check_stages_cut_alike(model, parallel.tp_plan)


def check_data(job: Job, samples: Any, planned: Collection[str] = ()) -> None:
    """Raises ConfigError for samples that the layout can't run. Reads one if it depends on that.

    ``planned``: of strategy auto, by what the planner may share samples out.
    """
    asked = {*job.parallel.wish.shared, *planned}
    for key in (name for name in reversed(MODEL_DIMENSIONS) if name in asked - {OF_LAYERS}):
        of_transformers = job.model.preset is None
        try:
            check_batch(samples.collate([samples[0]]), f"parallel.{key}", of_transformers)
        except ConfigError as error:
            if not planned:
                raise
            raise ConfigError(f"parallel.strategy: auto may choose {key}: {error}") from None


# ------------------------------------------------------------------------------- helpers


def _layout(groups: Groups) -> Layout:
    return groups.assignment.layout


def _cut(job: Job, module: nn.Module, groups: Groups | None) -> Mapping[int, nn.Module]:
    """This rank's pipeline stages by number; without a pipeline, the whole model."""
    if groups is None or not _layout(groups).has_stages:
        return {0: module}
    assert groups.rank is not None
    layout = _layout(groups)
    at = layout.coordinates(groups.rank)
    return cut(module, at.pp, layout.pp, job.parallel.schedule)


def _prepare(
    job: Job, part: nn.Module, groups: Groups | None, device: torch.device
) -> Sequence[nn.Module]:
    """Shares out a part of the model on meta, and allocates it. Returns its blocks."""
    if groups is not None and _layout(groups).cuts_layers:
        assert groups.mesh is not None
        parallelize(part, groups.mesh["tp"], job.parallel.tp_plan)
    blocks: Sequence[nn.Module] = (
        list(part.blocks) if isinstance(part, ModelStage) else block_modules(part)
    )
    shared = groups is not None and _layout(groups).cuts_layers
    blocks = compiled_layers(part, blocks, job, shared)
    if job.parallel.offload_activations and device.type == "cuda":
        keep_in_host_memory(blocks)
    if isinstance(part, Decoder | DecoderStage):
        part.loss_chunk_tokens = job.parallel.loss_chunk_tokens
    if groups is not None and groups.context is not None:
        of_rank = share_of_positions(part, job.parallel, _layout(groups), groups.context)
        share_positions(part, of_rank)
    if groups is not None and _needs_fsdp(job, _layout(groups), device):
        shard(job, part, blocks, groups)
    to_empty(part, device)
    if job.parallel.unused_parameters:
        use_all(part, [] if groups is None else blocks)
    return blocks


def _needs_fsdp(job: Job, layout: Layout, device: torch.device) -> bool:
    """For gradients of several data ranks, or for compute in another dtype."""
    is_lower = DTYPES[job.precision.dtype] is not torch.float32
    return layout.gradient_size > 1 or is_lower or is_cut_alone(job, layout, device)


def shard(job: Job, module: nn.Module, blocks: Sequence[nn.Module], groups: Groups) -> None:
    """Cuts ``module`` by FSDP2, each of its ``blocks`` by itself, if it alone has its weights."""
    layout, mesh = _layout(groups), groups.mesh
    assert mesh is not None
    by_fsdp = layout.dp_replicate > 1 and job.comm.compress_replicas is None
    names = ("dp_replicate", "dp_shard") if by_fsdp else ("dp_shard",)
    if layout.cuts_layers:  # logits are a view of a DTensor's; nothing here writes to them
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # A pipeline's micro-batches come in turns: gathering anew for each costs more.
    gathers_often = not layout.has_stages and job.parallel.reshard_after_backward
    options: dict[str, Any] = {
        "mp_policy": mixed_precision(DTYPES[job.precision.dtype]),
        "reshard_after_forward": None if gathers_often else False,
    }
    if groups.experts is not None:
        shard_experts(module, groups.experts, layout, options)
    for block in [*_with_weights_of_their_own(blocks, module), module]:
        unit = fully_shard(block, mesh=mesh[names], **options)
        if job.comm.compress_shards and layout.state_shards > 1:
            compress(unit)


def _with_weights_of_their_own(
    blocks: Sequence[nn.Module], module: nn.Module
) -> Iterable[nn.Module]:
    """FSDP2 cuts a weight once: one that two have is of what they are both in, ``module``."""
    places = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    for block in blocks:
        inside = Counter(id(weight) for _, weight in block.named_parameters(remove_duplicate=False))
        if all(places[weight] == count for weight, count in inside.items()):
            yield block


def _parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """By the name that the whole model has for each; of a tied weight in two stages, one."""
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in _chain([part.named_parameters()]):
            known_as = part.known_as if isinstance(part, ModelStage) else {}
            found.setdefault(known_as.get(name, name), parameter)
    return found


def _chain(named: Iterable[Iterable[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """With names as in the bare model."""
    return ((plain_name(name), value) for part in named for name, value in part)
