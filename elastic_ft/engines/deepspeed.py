"""DeepSpeed ZeRO-0 to 3, initialised anew in each generation.

A rank's part of the state is what its flat fp32 partitions have of each parameter: a range of the
flattened tensor, listed as the boxes that make it up (docs/adr/0005). The weights that forward
uses are derived from it. So any of its states moves to and from the native engine's.

Gradients, clipping and the optimizer's step are DeepSpeed's; losses, the learning rate and fp16's
loss scale follow the native engine's rules. Lower precision is autocast over fp32 weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box, boxes_of_range
from elastic_ft.engines import deepspeed_private
from elastic_ft.engines.activations import checkpoint_activations
from elastic_ft.engines.base import BatchSums, MicroBatch, Update
from elastic_ft.engines.from_folder import read_weights
from elastic_ft.engines.learning_rates import learning_rate, set_rates
from elastic_ft.engines.modules import (
    TermCounts,
    inside,
    plain_name,
    seed_for,
    to_device,
    to_empty,
)
from elastic_ft.engines.of_job import EngineOfJob
from elastic_ft.engines.optimizer_state import materialise
from elastic_ft.engines.optimizers import make_optimizer, warm_optimizer
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import block_modules, computed_buffers
from elastic_ft.models.loss import loss_and_named
from elastic_ft.models.named import NamedSums, fetched
from elastic_ft.state.tensors import LocalState, StateTensor, keyed, tensor_name

BUCKET_ELEMENTS = 1 << 25  # of gradients reduced at a time; DeepSpeed's own default takes 2 GB


class DeepSpeedEngine(EngineOfJob):
    """A job's model under DeepSpeed: bare (before ``attach``, after ``detach``), or attached.

    Nothing is kept from one generation to the next, and no thread can be left inside it: see
    ``Engine`` for what each method does, and for ``intact``.
    """

    can_be_left = False
    reference = None

    def __init__(
        self,
        job: Job,
        model_factory: Callable[[], nn.Module],
        device: torch.device,
        tokens_per_sample: int,
    ) -> None:
        super().__init__(job, model_factory, device, tokens_per_sample)
        self.stage = job.parallel.zero_stage or 0
        self._engine: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._blocks: list[nn.Module] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._state: LocalState | None = None

    # ------------------------------------------------------------------ layout

    def prepare(self) -> None:
        torch_private.forget_meshes()
        deepspeed_private.import_deepspeed(self.device)
        with torch.device("meta"):
            module = self._factory()
        check_parameters(module)
        self._computed = computed_buffers(self._factory)
        warm_optimizer(self.job.optimizer)

    def keeps(self, layout: Layout) -> bool:
        return False

    def attach(self, groups: Groups) -> bool:
        """Everything is made anew: the partitions depend on the number of ranks."""
        self._groups = groups
        module = self._build()
        parameters = {plain_name(n): p for n, p in module.named_parameters()}
        optimizer = make_optimizer(self.job.optimizer, parameters)
        if self.stage == 0:
            materialise(optimizer)
        self._engine = deepspeed_private.make_engine(
            module, optimizer, self._config(module), self.device
        )
        self._optimizer = optimizer
        if self.stage:
            _materialise_flats(optimizer, deepspeed_private.flats(self._engine, self.stage))
        self._state = None
        return False

    def detach(self, in_use: list[object] | None = None) -> LocalState:
        assert in_use is None, "what DeepSpeed patches can't be reset under a thread that uses it"
        state = self.state() if self._optimizer is not None else {}
        engine, self._engine, self._optimizer = self._engine, None, None
        self._blocks, self._buffers, self._state, self._groups = [], {}, None, None
        if engine is not None:
            deepspeed_private.destroy_engine(engine)
        deepspeed_private.reset_globals()
        return state

    def _build(self) -> nn.Module:
        """The whole model, uninitialised: stage 3 cuts it up a moment later."""
        with torch.device("meta"):
            module = self._factory()
        self._blocks = block_modules(module)
        if again := self.job.parallel.activation_checkpointing:
            self._blocks = checkpoint_activations(module, self._blocks, again)
        to_empty(module, self.device)
        buffers = {plain_name(n): b for n, b in module.named_buffers()}
        for name, value in self._computed.items():
            buffers[name].copy_(value)
        persistent = {plain_name(n) for n in module.state_dict()}
        self._buffers = {n: b for n, b in buffers.items() if n in persistent}
        return module

    def _config(self, module: nn.Module) -> dict[str, Any]:
        numel = sum(p.numel() for p in module.parameters())
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(BUCKET_ELEMENTS, numel),
            "round_robin_gradients": False,  # it reorders partitions: ``slices`` would be wrong
        }
        if self.job.parallel.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": self.job.batch.micro_batch_size,
            "gradient_accumulation_steps": 1,  # the boundary is set by hand
            "gradient_clipping": (self.job.optimizer.grad_clip or 0.0) if self.stage else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # it would be compiled first
        }

    # ------------------------------------------------------------------- state

    def state(self) -> LocalState:
        if self._state is None:
            self._state = keyed(self._list_state())
        return self._state

    def _list_state(self) -> Iterator[tuple[str, StateTensor]]:
        assert self._optimizer is not None
        for part in self._slices():
            yield from _pieces(f"model.{plain_name(part.name)}", part, part.flat.detach())
            for key, value in sorted(self._optimizer.state[part.flat].items()):
                if not isinstance(value, torch.Tensor):
                    raise ConfigError(
                        f"optimizer.name: engine deepspeed carries tensors, native numbers too; "
                        f"{key} is {type(value).__name__}"
                    )
                name = f"optim.{plain_name(part.name)}.{key}"
                if value.shape == part.flat.shape:
                    yield from _pieces(name, part, value)
                elif value.dim() == 0:
                    yield name, StateTensor((), Box((), ()), value)
                else:
                    raise ConfigError(
                        f"optimizer.name: DeepSpeed partitions what has an element for each of "
                        f"the parameter's; {key} is {list(value.shape)}"
                    )
        for name, buffer in self._buffers.items():
            shape = tuple(buffer.shape)
            yield f"model.{name}", StateTensor(shape, Box.whole(shape), buffer, volatile=True)
        for name, value in self._loss_scale.state.items():
            yield name, StateTensor((), Box((), ()), value)

    def _slices(self) -> Iterator[deepspeed_private.Slice]:
        if self.stage:
            yield from deepspeed_private.slices(self._engine, self.stage)
            return
        # Every rank has everything.
        for name, parameter in self._engine.module.named_parameters():
            shape = tuple(parameter.shape)
            yield deepspeed_private.Slice(name, shape, 0, parameter.numel(), parameter, 0)

    def initialise(self) -> None:
        state = self.state()
        by_name: dict[str, list[StateTensor]] = defaultdict(list)
        for key, tensor in state.items():
            by_name[tensor_name(key)].append(tensor)
        with torch.no_grad():
            if self.job.model.weights is not None:
                assert self._groups is not None
                of = (self.job, self.base_digest, self._groups, self._factory)
                most = max(map(len, by_name.values()))  # a piece of each tensor at a time
                read_weights(
                    *of,
                    ({n: p[i] for n, p in by_name.items() if i < len(p)} for i in range(most)),
                )
            else:
                self._initialise_from_seed(state)
            for name, pieces in by_name.items():
                if name.startswith("optim."):
                    for piece in pieces:
                        piece.local.zero_()
        self._loss_scale.reset()

    def restored(self) -> None:
        self._loss_scale.restored()
        if self.stage:
            deepspeed_private.weights_from_masters(self._engine, self.stage)

    # ---------------------------------------------------------------- training

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        """Its collectives are part of backward: all ranks run as many, padded if need be."""
        return max(dealt)

    def run_batch(self, step: int, micro_batches: Sequence[MicroBatch], reach: Reach) -> BatchSums:
        assert self._groups is not None
        engine = self._engine
        factor = self._groups.world_size / self._nominal_tokens  # gradients are averaged over ranks
        factor *= self._loss_scale.factor
        if self.stage:
            engine.optimizer.override_loss_scale(1.0)
        total: torch.Tensor | float = 0.0
        tokens = TermCounts()
        self.named.begin()
        self._first_gradients.watch(reach, self._blocks)
        for index, micro_batch in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            seed_for(self.job.seed, step, micro_batch.number)
            reach("forward", None if index == 0 else step)
            with self._cast():
                loss, count, found = loss_and_named(
                    engine, to_device(micro_batch.data, self.device, copied=True)
                )
                if index == 0:
                    reach("backward")
                engine.backward(loss * (factor * micro_batch.weight), scale_wrt_gas=False)
            self.named.add(found, micro_batch.weight)
            if micro_batch.weight:
                total = total + loss.detach().double()
                tokens.add(count)
        norm: torch.Tensor | float = 0.0
        if not self.stage and self._groups.rank == 0:  # all have the same
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        asked = [total, tokens.queued(), norm, *self.named.queued()]
        told, terms, whole, *named = fetched(asked)
        self._check_said()
        return BatchSums(told, int(terms), whole**2, named)

    def apply(self, step: int, tokens: int, squares: float, reach: Reach) -> Update:
        assert self._optimizer is not None
        reach("before_optimizer")
        set_rates(self._optimizer, learning_rate(self.job.optimizer, self.job.steps, step))
        # What the gradients are too large by:
        scale = self._loss_scale.factor * max(tokens, 1) / self._nominal_tokens
        if self.stage:
            norm = self._step(scale, reach)
        else:
            norm = self._replicated_step(math.sqrt(squares) / scale, scale, reach)
        if not math.isfinite(norm):
            return self._loss_scale.skipped(step, norm)
        self._loss_scale.applied()
        return Update(norm)

    def _step(self, scale: float, reach: Reach) -> float:
        """Returns the gradients' global norm. Nothing is applied if it is not finite.

        Until the gathering at its end is done, a part of the ranks may have the new state: not
        intact, and who is left goes on from the snapshots.
        """
        engine = self._engine
        engine.optimizer.override_loss_scale(scale)
        self.intact = False
        with inside(reach):
            engine.step()
        self._check_said()
        self.intact = True
        if deepspeed_private.overflowed(engine):
            return math.inf
        return float(engine.get_global_grad_norm())

    def _replicated_step(self, norm: float, scale: float, reach: Reach) -> float:
        """Stage 0: DeepSpeed has averaged the gradients, and knows no loss scale."""
        engine = self._engine
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        if not math.isfinite(norm):
            engine.zero_grad()
            return norm
        clip = self.job.optimizer.grad_clip
        torch._foreach_mul_(
            gradients, (min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0) / scale
        )
        self.intact = False
        with inside(reach):
            engine.step()
        self.intact = True
        return norm

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int, NamedSums]:
        sums = NamedSums()
        self._engine.eval()
        try:
            with torch.no_grad(), self._cast():
                found = self._evaluated(self._engine, micro_batches, sums)
        finally:
            self._engine.train()
        return (*found, sums)


# ------------------------------------------------------------------------------- helpers


def check_parameters(module: nn.Module) -> None:
    """Raises ConfigError if DeepSpeed can't train one of them."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"parallel.engine: deepspeed trains every parameter, {name} is frozen; use native"
            )
        if not parameter.dim():
            raise ConfigError(
                f"parallel.engine: deepspeed can't partition a scalar, which {name} is; use native"
            )


def _materialise_flats(
    optimizer: torch.optim.Optimizer, flats: list[tuple[int, torch.Tensor]]
) -> None:
    """Makes the optimizer create its state of each partition, see ``materialise``.

    With offload the gradients' memory is there already, and DeepSpeed counts on it.
    """
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for index, flat in flats:
        gradient = flat.grad
        for number, group in enumerate(groups):
            group["params"] = [flat] if number == index else []
        materialise(optimizer)
        flat.grad = gradient
    for group, parameters in zip(groups, before, strict=True):
        group["params"] = parameters


def _pieces(
    name: str, part: deepspeed_private.Slice, flat: torch.Tensor
) -> Iterator[tuple[str, StateTensor]]:
    """The boxes that make up ``part``, each aliasing its place in ``flat``."""
    values = flat.detach().view(-1)[part.offset : part.offset + part.numel]
    at = 0
    for box in boxes_of_range(part.shape, part.start, part.start + part.numel):
        yield name, StateTensor(part.shape, box, values[at : at + box.numel].view(box.sizes))
        at += box.numel
    if not part.numel:
        nothing = Box((0,) * len(part.shape), (0,) * len(part.shape))
        yield name, StateTensor(part.shape, nothing, values.view(nothing.sizes))
