"""Pipeline parallelism: one rank's stages, and how a batch runs through.

Data ranks have a pipeline each. A pipeline runs the micro-batches that its data rank was dealt,
padded with ones that have no targets where the schedule or FSDP needs as many everywhere. All its
ranks have read them: masks and positions need not go from stage to stage.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_ft.core.layouts.layout import count_stages, split_layers, stages_of
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.modules import TermCounts, local_part
from elastic_ft.engines.tensor_parallel import check_no_dropout
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.models import mixture_stage, stages
from elastic_ft.models.decoder import Decoder, DecoderStage
from elastic_ft.models.experts import MixtureDecoder
from elastic_ft.models.loss import (
    IGNORED_LABEL,
    TOKEN_KEYS,
    lengthened,
    shifted,
    with_tokens,
)
from elastic_ft.models.mixture_stage import MixtureStage
from elastic_ft.models.named import fetched
from elastic_ft.models.stages import KEY, PrunedStage, check_stages, parts_of

ModelStage = DecoderStage | PrunedStage
# Of routers, by transformers' names. With tp all ranks draw the same of what they all have.
NOISES = ("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps")
Shifted = tuple[Tensor, Tensor, dict[str, Tensor]]  # tokens, targets, masks and positions
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleZBVZeroBubble",
}


def _pipelining() -> Any:
    """The import takes half a second, which jobs without a pipeline don't wait for."""
    # Where a peer is lost it prints its whole schedule: what broke off is raised, and told.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    return importlib.import_module("torch.distributed.pipelining")


def check_pipeline(model: nn.Module, ranks: int, schedule: str) -> None:
    """Raises ConfigError, one line, for a model that can't be cut into so many stages."""
    if ranks == 1:
        return
    if isinstance(model, Decoder | MixtureDecoder):
        layers = model.config.n_layers
    else:
        check_stages(model)
        check_no_dropout(
            model, KEY, "ranks of a pipeline would draw other numbers than one process", NOISES
        )
        parts = parts_of(model)
        assert parts is not None
        layers = len(parts.layers)
    _pipelining()  # before anyone waits for it
    stages = count_stages(ranks, schedule)
    if layers < stages:
        raise ConfigError(
            f"{KEY}: {ranks} ranks with schedule {schedule} need {stages} stages, "
            f"the model has {layers} layers"
        )


def cut(model: nn.Module, rank: int, ranks: int, schedule: str) -> dict[int, ModelStage]:
    """Returns this rank's stages by number; stages cost alike."""
    if isinstance(model, Decoder):
        costs: list[int] = model.stage_costs()
        make: Callable[[range], ModelStage] = model.stage
    elif isinstance(model, MixtureDecoder):
        costs, make = mixture_stage.mixture_stage_costs(model), partial(MixtureStage, model)
    else:
        costs, make = stages.stage_costs(model), partial(PrunedStage, model)
    parts = split_layers(costs, count_stages(ranks, schedule))
    return {number: make(parts[number]) for number in stages_of(rank, ranks, schedule)}


class TiedWeight:
    """The embedding of a pipeline whose last stage projects with it, as this rank has it.

    Both stages hold it and sum their gradients, so that both apply the same update. Where one rank
    has both stages (zero_bubble), one of the two is trained, and the other is its copy.
    """

    def __init__(
        self, stages: Mapping[int, ModelStage], group: dist.ProcessGroup, schedule: str
    ) -> None:
        ranks = dist.get_world_size(group)
        last = count_stages(ranks, schedule) - 1
        owners = {n: rank for rank in range(ranks) for n in stages_of(rank, ranks, schedule)}
        first, final = (stages.get(n) for n in (0, last))
        ends: list[Any] = [
            end for end in (first and first.embedding, final and final.output) if end
        ]
        self._group = group
        self._weight: nn.Parameter | None = ends[0].weight if ends else None
        self._copy: nn.Parameter | None = ends[1].weight if len(ends) == 2 else None
        self._peer = owners[last if first is not None else 0]

    def copies(self, gradient: Tensor) -> int:
        """How many stages on different ranks have ``gradient``."""
        shared = self._weight is not None and self._copy is None
        return 2 if shared and self._weight.grad is gradient else 1  # type: ignore[union-attr]

    def sum_gradients(self) -> None:
        """After gradients are reduced over data ranks, and before they are used."""
        if self._weight is None:
            return
        own = local_part(self._weight.grad)
        if self._copy is not None:
            own.add_(local_part(self._copy.grad))
            self._copy.grad = None
            return
        other = torch.empty_like(own)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=self._peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=self._peer),
            ]
        )
        for work in works:
            work.wait()
        own.add_(other)  # a + b is b + a, bit by bit: both stages go on with the same

    @torch.no_grad()
    def refresh(self) -> None:
        """After the weight has changed."""
        if self._copy is not None:
            local_part(self._copy.detach()).copy_(local_part(cast("Tensor", self._weight).detach()))


def micro_batches_to_run(most_dealt: int, ranks: int, schedule: str) -> int:
    """How many micro-batches a pipeline must run so that the schedule can be made.

    1F1B needs one for each stage; interleaved 1F1B goes in rounds of equal size.
    """
    if schedule == "1f1b":
        return max(most_dealt, ranks)
    if schedule == "interleaved1f1b":
        return -(-most_dealt // ranks) * ranks
    return most_dealt


class Pipeline:
    """This rank's part of one pipeline, for one generation.

    Args:
        stages: this rank's, by number.
        sharing: how many tensor-parallel ranks may share the positions of what stages hand on.
        dtype: of what stages hand on.
    """

    def __init__(
        self,
        stages: Mapping[int, ModelStage],
        group: dist.ProcessGroup,
        schedule: str,
        sharing: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stages, self._group, self._schedule = stages, group, schedule
        self._sharing, self._dtype, self._device = sharing, dtype, device
        self._ranks = dist.get_world_size(group)
        self._count = count_stages(self._ranks, schedule)
        self._runner: Any = None
        self._shape: torch.Size | None = None  # of the micro-batches that it runs
        self._factor = 1.0
        self._total = torch.zeros((), dtype=torch.float64)

    @property
    def has_last(self) -> bool:
        return self._count - 1 in self.stages

    def run(
        self, micro_batches: Sequence[MicroBatch], factor: float
    ) -> tuple[Tensor, Tensor | int]:
        """Forward and backward of ``factor`` times the loss.

        Returns (loss sum, tokens), of the rank that has the last stage; the others have no tokens,
        and of the loss what routers of theirs add. Nobody has waited for either.
        """
        batches = [self._read(m) for m in micro_batches]
        tokens, targets, more = self._together(batches)
        shape = torch.Size((len(batches[0][0]), tokens.shape[1]))
        if shape != self._shape:
            self._runner, self._shape = self._make_runner(len(batches), shape), shape
        self._factor = factor
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        mixtures = [stage for stage in self.stages.values() if isinstance(stage, MixtureStage)]
        for stage in mixtures:
            stage.factor, stage.router_sum = factor, torch.zeros_like(self._total)
        self._runner.step(
            *((tokens,) if 0 in self.stages else ()),
            target=targets if self.has_last else None,
            return_outputs=False,
            **more,
        )
        total = self._total + sum(stage.router_sum for stage in mixtures)
        return total, (targets != IGNORED_LABEL).sum() if self.has_last else 0

    @property
    def _any(self) -> ModelStage:
        return next(iter(self.stages.values()))

    def _together(self, batches: Sequence[Shifted]) -> Shifted:
        """What ranks have of them. With ``context`` each rank's part of a length is a multiple."""
        multiple = getattr(self._any, "length_multiple", 1) if self._any.context is None else 1
        return own_positions(self._any, *joined(batches, multiple))

    def _read(self, micro_batch: MicroBatch) -> Shifted:
        return tokens_and_targets(micro_batch, self._device, self._any)

    def _make_runner(self, micro_batches: int, shape_BT: torch.Size) -> Any:
        pipelining, stages = _pipelining(), []
        for number, part in self.stages.items():
            part.length = shape_BT[1]
            received, sent = self._shapes(part, shape_BT)
            stages.append(
                pipelining.PipelineStage(
                    part,
                    number,
                    self._count,
                    self._device,
                    input_args=self._like(received, number > 0),
                    output_args=self._like(sent, True),
                    group=self._group,
                )
            )
        schedule = getattr(pipelining.schedules, SCHEDULES[self._schedule])
        several = self._count > self._ranks
        return schedule(
            stages if several else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def _shapes(self, part: ModelStage, shape_BT: torch.Size) -> tuple[Any, Any]:
        """Of what a stage receives and of what it hands on."""
        batch, length = shape_BT
        between = (batch, length // (self._sharing if part.shares_positions else 1), part.dim)
        received = shape_BT if part.embedding is not None else between
        if part.output is None:
            return received, between
        width = part.dim if part.loss_chunk_tokens else part.vocabulary
        return received, (*shape_BT, width)

    def _like(self, shape: Any, activations: bool) -> Tensor:
        dtype = self._dtype if activations else torch.int64
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=activations)

    def _loss(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        loss = self.stages[self._count - 1].loss_sum(output, targets_BT)
        self._total += loss.detach().double()
        return loss * self._factor

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """Returns (loss sum, tokens) of the rank that has the last stage; (0, 0) of the others."""
        total: Tensor | float = 0.0
        terms = TermCounts()
        for micro_batch in micro_batches:
            tokens, targets, more = self._together([self._read(micro_batch)])
            output = self._forward(tokens, more)
            if output is not None:
                total = total + self.stages[self._count - 1].loss_sum(output, targets).double()
                terms.add((targets != IGNORED_LABEL).sum())
        told, count = fetched([total, terms.queued()])
        return told, int(count)

    def _forward(self, tokens_BT: Tensor, more: Mapping[str, Tensor]) -> Tensor | None:
        """One micro-batch through all stages, one after the other; what the last one returns."""
        owners = {
            stage: rank
            for rank in range(self._ranks)
            for stage in stages_of(rank, self._ranks, self._schedule)
        }
        x: Tensor | None = None
        for number in range(self._count):
            part = self.stages.get(number)
            if part is None:
                continue
            if number == 0:
                x = tokens_BT
            elif number - 1 not in self.stages:
                shape, _ = self._shapes(part, tokens_BT.shape)
                x = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=owners[number - 1])
            part.length = tokens_BT.shape[1]
            x = part(x, **more)
            if number + 1 < self._count and number + 1 not in self.stages:
                dist.send(x.contiguous(), group=self._group, group_dst=owners[number + 1])
        return x if self.has_last else None


def run_watched(
    pipeline: Pipeline,
    step: int,
    micro_batches: Sequence[MicroBatch],
    factor: float,
    last_block: nn.Module,
    reach: Reach,
) -> tuple[Tensor, Tensor | int]:
    """``Pipeline.run``, with marks of progress as micro-batches leave ``last_block``."""
    passed = 0

    def left(block: nn.Module, args: Any, output: Any) -> None:
        nonlocal passed
        passed += 1
        if passed > 1:
            return reach("forward", step)
        output = output[0] if isinstance(output, tuple) else output
        output.register_hook(lambda _: reach("backward"))

    reach("forward")
    handle = last_block.register_forward_hook(left)
    try:
        return pipeline.run(micro_batches, factor)
    finally:
        handle.remove()


def check_batch(batch: Any, key: str = KEY, of_transformers: bool = False) -> None:
    """Raises ConfigError for a micro-batch that a job with ``key`` can't have: what ranks that
    share positions see has no mask."""
    who = "stages" if key == KEY else "ranks that share positions"
    is_named = isinstance(batch, Mapping)
    if is_named and of_transformers:
        batch = with_tokens(batch)
    if not is_named or "tokens" not in batch:
        found = f"{sorted(batch)}" if is_named else f"a {type(batch).__name__}"
        raise ConfigError(f"{key}: {who} take batches with tokens, found {found}")
    known = TOKEN_KEYS - ({"attention_mask"} if key != KEY else set())
    if odd := batch.keys() - known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{key}: {who} take {names}, found {min(odd)} in a batch")


def tokens_and_targets(micro_batch: MicroBatch, device: torch.device, stage: ModelStage) -> Shifted:
    """int64 [B, T] each; of padding, every target is one to ignore. Raises ConfigError."""
    key = KEY if stage.context is None else "parallel.cp"
    check_batch(micro_batch.data, key, isinstance(stage, PrunedStage))
    named = with_tokens(micro_batch.data)
    tokens, targets, more = shifted(
        **{k: v.to(device, non_blocking=True) for k, v in named.items()}
    )
    if not micro_batch.weight:
        targets = torch.full_like(targets, IGNORED_LABEL)
    if isinstance(stage, MixtureStage):
        more["counted"] = torch.full_like(tokens, int(micro_batch.weight > 0))
    return tokens, targets, more


def joined(batches: Sequence[Shifted], multiple: int = 1) -> Shifted:
    """One after the other, each as long as the longest, and that a ``multiple``. Raises ConfigError
    if some have what others have not."""
    longest = max(tokens.shape[1] for tokens, _, _ in batches)
    longest += -longest % multiple
    keys = {tuple(sorted({*more, "tokens"})) for _, _, more in batches}
    if len(keys) > 1:
        found = " and ".join(", ".join(some) for some in sorted(keys)[:2])
        raise ConfigError(f"{KEY}: a step's micro-batches differ, some have {found}")
    tokens, targets, inputs = zip(*(lengthened(*batch, longest) for batch in batches), strict=True)
    more = {key: torch.cat([of[key] for of in inputs]) for key in inputs[0]}
    return torch.cat(tokens), torch.cat(targets), more


def own_positions(
    stage: ModelStage, tokens: Tensor, targets: Tensor, more: dict[str, Tensor]
) -> Shifted:
    """This rank's, where ranks share positions. Of batches that are joined: where a rank's are
    depends on how long all are."""
    if stage.context is None:
        return tokens, targets, more
    cut = stage.context.cut
    more = stage.context.inputs(more, tokens, isinstance(stage, PrunedStage))
    return cut(tokens), cut(targets, IGNORED_LABEL), more
