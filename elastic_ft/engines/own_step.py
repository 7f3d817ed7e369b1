"""One step as a user's function makes it: batches, backward, the agreement, the optimizers' hooks.

The agreement (I4) comes before the first optimizer steps, from its own hook.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.engines import gradients, own_watch
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.laid_out import LaidOut
from elastic_ft.engines.left_behind import stays_inside
from elastic_ft.engines.modules import FirstGradients, TermCounts, seed_all_for
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.own_attempt import Running, check_alike
from elastic_ft.engines.own_buffers import BufferPlace, Buffers, put_into
from elastic_ft.engines.own_forward import Routed
from elastic_ft.engines.own_frozen import Frozen
from elastic_ft.engines.own_scales import Scales
from elastic_ft.engines.own_state import OwnState
from elastic_ft.errors import ConfigError
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.models.named import NamedSums, checked, fetched

OTHER_DRAWS = 50_021  # micro-batches: a second pass over a batch draws other numbers
# In a micro-batch's place: what is drawn there all ranks draw. Less than the last is behind a pass.
BEFORE_ALL, BEHIND_ALL = -1, -2


class OwnStep:
    """That part of an ``OwnEngine``, and what there is for it.

    Args:
        models, optimizers: as the user made them, in any order in which all ranks give them.
    """

    def __init__(
        self,
        job: Job,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self.job, self.device = job, device
        self.models, self.optimizers = list(models), list(optimizers)
        self.own = OwnState(1024 * (job.loop.state_kb if job.loop is not None else 64))
        self.intact = True
        self.named = NamedSums()
        self.by_reference = False  # weights that nothing trains, see ``own_frozen``
        self._frozen: Frozen | None = None
        self.seed: int | None = job.seed  # of each micro-batch's draws; None: they go on and on
        self.running: Running | None = None
        self._listed: list[nn.Parameter] = []  # attached; listing a module's takes a while
        self._persistent_at: list[BufferPlace] = []
        self._buffers = Buffers(self.models, self._persistent)
        self._groups: Groups | None = None
        self._runners: dict[int, DistributedDataParallel] = {}  # by number of the model
        self._trainable: set[nn.Parameter] = set()  # as prepared
        self._trained: list[dict[str, nn.Parameter]] = []  # of each model; attached
        self._routed: dict[int, Routed] = {}
        # Also in a world of one: what is cut once stays cut, and keeps its objects.
        self._is_cut = job.parallel.strategy != "ddp"
        # A cut module can't be left to a thread that sleeps in it: it is the user's.
        self.can_be_left, self.reference, self.experts = not self._is_cut, None, 0
        self._told_last: bool | None = None  # what FSDP2's modules know of the micro-batch
        self._alike: int | None = None  # targets of a micro-batch whose loss came as a mean
        self._replicated = False
        self._laid_out: LaidOut | None = None
        self._gathering: list[FSDPModule] = []  # an evaluation leaves them gathered
        self._kept: list[OptimizerState] = []
        self._first_gradients = FirstGradients()
        self._initial: dict[str, torch.Tensor] = {}
        self._stepping: AbstractContextManager[None] | None = None
        self._scales = Scales(self.optimizers)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._laid_out.blocks if self._laid_out is not None else []

    def _persistent(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place in self._persistent_at:
            if (buffer := place.buffer) is not None:
                yield place.name, buffer

    def attempt(self, running: Running) -> None:
        """From now on, what the user's function tells is of this attempt at a step."""
        self.running = running
        self._scales.begin()
        self._seed(running, BEFORE_ALL)
        self.named.begin()
        self._watch_first_gradients(running.reach)

    def micro_batches(self, running: Running) -> Iterator[MicroBatch]:
        """Each while it is the current one."""
        running.passes += 1
        other = OTHER_DRAWS * (running.passes - 1)
        for index, micro_batch in enumerate(running.micro_batches):
            if running is not self.running:
                raise ConfigError("a batch is of the step that it was given to, and of no other")
            last = index == len(running.micro_batches) - 1
            self._seed(running, micro_batch.number + other)
            running.reach("forward", None if index == 0 else running.number)
            self._accumulate(last)
            if index == 0:
                running.before = own_watch.versions(self._listed)
                self._buffers.begin()
                self._disarm()
            running.current, running.begun = micro_batch, index + 1
            kept = {} if micro_batch.weight else {n: b.clone() for n, b in self._persistent()}
            yield micro_batch
            if kept:  # padding is no sample: running statistics, say
                put_into(self._persistent(), kept)
        self._seed(running, BEHIND_ALL - running.passes)

    def _seed(self, running: Running, place: int) -> None:
        if self.seed is not None:
            seed_all_for(self.seed, running.number, place)

    def _accumulate(self, last: bool) -> None:
        """What can wait for a step's last micro-batch is not sent before."""
        for number, runner in self._runners.items():
            runner.require_backward_grad_sync = last
            self._routed[number].entered = False
        if self._is_cut and last is not self._told_last:
            self._told_last, parallel = last, self.job.parallel
            for model in self.models:
                assert isinstance(model, FSDPModule)
                model.set_reshard_after_backward(last or parallel.reshard_after_backward)
                model.set_requires_gradient_sync(last or parallel.reduce_gradients != "step")
                model.set_requires_all_reduce(last)

    def _disarm(self) -> None:
        """A forward that no backward has followed (of what is detached, say) has DDP wait for
        gradients: it would send those of the next micro-batch, whether that is the last or not."""
        for number, runner in self._runners.items():
            if len(self._runners) > 1 or self._routed[number].is_ahead:
                torch_private.forget_forwards(runner)

    def _watch_first_gradients(self, reach: Reach) -> None:
        last = None
        for parameter in () if self._is_cut else self._listed:
            last = parameter if parameter.requires_grad else last
        self._first_gradients.watch(reach, self.blocks, last)

    @stays_inside()
    def backward(
        self,
        loss: torch.Tensor,
        count: torch.Tensor | int | None,
        metrics: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        of: int | None = None,
    ) -> None:
        """``loss``: a sum over ``count`` terms; None: a mean, of as many as in any other.

        ``metrics``: see ``models.named``. ``of``: the global batch's terms, where ``loss`` was
        divided by them already.
        """
        running = self._attempted("backward")
        micro_batch = running.current
        if micro_batch is None:
            raise ConfigError("ctx.backward: comes inside `for micro in batch`")
        assert self._groups is not None
        weight = micro_batch.weight
        if count is None and weight:
            self._alike = check_alike(micro_batch.data, self._alike)
        if running.begun == 1:
            running.reach("backward")
        running.divided = of is not None
        terms = self._terms(running, count)
        running.told += 1
        if running.is_compared and micro_batch.number == 0 and running.passes == 1:
            self._note_compared(running, loss.detach().double() * (of or 1))
        if metrics:
            self._note_named(running, metrics, weight)
        if weight:
            running.loss = running.loss + loss.detach().double() * (of or 1)
            running.terms.add(terms)
        divisor = 1 if running.divided else running.divisor
        share = loss * (weight * self._groups.assignment.layout.data_parallel_size / divisor)
        if scaler is not None:
            self._scales.use(scaler)
        torch.autograd.backward(share if scaler is None else scaler.scale(share))
        for routed in self._routed.values():
            routed.is_ahead = False
        if scaler is None and running.begun == len(running.micro_batches):
            running.made = own_watch.versions(self._listed)
            is_probed = self._is_cut and not running.divided
            running.probe = own_watch.probe(self._listed) if is_probed else None

    def _terms(self, running: Running, count: torch.Tensor | int | None) -> torch.Tensor | int:
        """How many a loss counts for. Means of one micro-batch add up to one loss, as those of
        several ``loss.backward()`` do. Raises ConfigError."""
        batch, told = self.job.batch, count
        divisor = batch.global_batch_size
        if count is None:
            place, divisor = (running.passes, running.begun), batch.micro_batches
            told, running.meant = int(running.meant != place), place
        if running.told and divisor != running.divisor:
            raise ConfigError("ctx.backward: give the count of a loss's terms always, or never")
        running.divisor = divisor
        assert told is not None
        return told

    def _note_compared(self, running: Running, loss: torch.Tensor) -> None:
        """Several losses of one micro-batch add up."""
        made = running.compared
        made[running.begun - 1 :] = [sum(made[running.begun - 1 :], loss)]

    def _note_named(self, running: Running, metrics: Any, weight: float) -> None:
        if running.agreed:
            raise ConfigError("ctx.backward: named metrics come with the first optimizer's losses")
        self.named.add(checked(metrics), weight)
        running.named += 1

    def _check_named(self, running: Running) -> None:
        """They are all ranks' sums: each has to know of how many, whoever has joined."""
        if running.named != (len(running.micro_batches) if self.named.names else 0):
            raise ConfigError(
                f"ctx.backward: {running.named} of {len(running.micro_batches)} micro-batches came "
                "with named metrics: give them with each, once, in each step, or with none"
            )

    def _attempted(self, what: str) -> Running:
        if self.running is None:
            raise ConfigError(f"ctx.{what}: comes inside the function that @ctx.step decorates")
        return self.running

    @stays_inside()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clips the global gradient. Returns its norm before, the same on all ranks."""
        running = self._attempted("clip_grad_norm_")
        self._agree(running)
        assert running.norm is not None
        self._scale(running, max_norm)
        return running.norm

    def clip_these(self, *norm: Any, **named: Any) -> float:
        """As torch's function, once gradients are means. Returns their norm before."""
        self.clip_grad_norm_(math.inf)
        total = nn.utils.clip_grad_norm_(*norm, **named)
        found = float(total.full_tensor() if isinstance(total, DTensor) else total)
        self.check_groups()  # NCCL raises nothing: a norm that was aborted is any number
        return found

    def check_groups(self) -> None:
        """Raises GroupBroken if what they have computed may be wrong: NCCL raises nothing."""
        assert self._groups is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._groups.check()

    def _agree(self, running: Running) -> None:
        """On the sums of all that ``backward`` was told since the last agreement (I4)."""
        if running.agreed and not running.told:
            return
        if not running.told:
            raise ConfigError(
                "optimizer.step: no loss came before it: ctx.backward(loss) stands where "
                "loss.backward() stood"
            )
        if running.begun < len(running.micro_batches):
            done = f"{running.begun} of {len(running.micro_batches)}"
            raise ConfigError(
                f"optimizer.step: after {done} micro-batches: all of a batch come before it"
            )
        if not running.agreed:
            self._check_named(running)
        assert self._groups is not None and self._groups.rank is not None
        place = self._groups.rank, self._groups.world_size
        self._buffers.share(*place, self.device, self.check_groups)
        squares, total, count, is_touched = self._told(running)
        terms, squares = running.agree(total, count, squares, self.own.sums(running.number))
        running.ratio = 1.0 if running.divided else running.divisor / max(terms, 1)
        if running.ratio != 1.0:  # what was done to gradients was done to something else
            own_watch.check_untouched(running.made)
            if is_touched:
                own_watch.refuse_changed()
        running.made = {}
        running.norm = math.sqrt(squares) * running.ratio
        running.agreed, running.scaled = True, False
        running.loss, running.terms, running.told = 0.0, TermCounts(), 0
        running.meant = (0, 0)

    def _told(self, running: Running) -> tuple[float, float, int, bool]:
        """This rank's squares of gradients, loss, and terms; and whether those are not what the
        last backward has made. All that is on the device is asked for at once, and named metrics
        and what losses are compared by with it: whatever waits before leaves it idle as long."""
        assert self._groups is not None
        norm = self._norm(running)
        frozen = self._frozen is not None and self._frozen.has_changed(running.number)
        touched = own_watch.has_changed(self._listed, running.probe)
        told = [norm, running.loss, running.terms.queued(), frozen, touched]
        counts = len(running.cleared), len(running.compared)
        more = [*running.cleared, *running.compared, *self.named.queued()]
        share, total, terms, is_frozen, is_touched, *found = fetched([*told, *more])
        self._groups.check()  # the device is done: with what it was to do, or with an abort
        if self._frozen is not None and is_frozen:
            self._frozen.refuse()
        if any(found[: counts[0]]):
            own_watch.refuse_cleared()
        running.cleared, running.compared = [], found[counts[0] : sum(counts)]
        self.named.take(found[sum(counts) :])
        if not self._is_cut:  # all have the same: one of them counts it
            share = share * share if self._groups.rank == 0 else 0.0
        return share, total, int(terms), bool(is_touched)

    def _norm(self, running: Running) -> torch.Tensor:
        """Of gradients that every rank has; or this one's share of their squares."""
        assert self._groups is not None and self._laid_out is not None
        found, layout = gradients.reduced(self._laid_out), self._groups.assignment.layout
        if self._is_cut:
            gradients.check_reduced(self._laid_out, self.models[0], layout.dp_replicate)
            return gradients.squares_of_shards(found, layout, None)
        for number, runner in self._runners.items():
            self._check_reduced(number, runner, running)
        return torch.nn.utils.get_total_norm(found)

    def _check_reduced(
        self, number: int, runner: DistributedDataParallel, running: Running
    ) -> None:
        """Of one model. Where there are several, not all have gradients of the same losses."""
        if not self._routed[number].entered:
            own_watch.check_called(self.models[number], running.before)
        trained = {n: p for n, p in self._trained[number].items() if p.requires_grad}
        if len(self.models) > 1 and all(p.grad is None for p in trained.values()):
            return
        gradients.check_all_reduced(trained, runner)

    def _scale(self, running: Running, max_norm: float | None) -> None:
        assert self._laid_out is not None and running.norm is not None
        ratio = 1.0 if running.scaled else running.ratio
        found = gradients.present(self._laid_out)
        gradients.scale(found, running.norm, ratio, max_norm)
        running.scaled = True

    @stays_inside()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running = self.running
        if running is None:
            raise ConfigError(
                "optimizer.step: outside the function that @ctx.step decorates: no other rank "
                "would do the same step"
            )
        self._agree(running)
        if not running.scaled:
            self._scale(running, None)
        running.reach("before_optimizer")
        self.intact = False
        self._stepping = self._kept[self._number(optimizer)].stepping()
        self._stepping.__enter__()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not None:
            self._stepping.__exit__(None, None, None)
            self._stepping = None

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(n for n, known in enumerate(self.optimizers) if known is optimizer)

    @stays_inside()
    def end_attempt(self) -> None:
        """The user's function has returned. Raises ConfigError if it made no step.

        A scaler calls no optimizer where gradients overflow: that is a step, too.
        """
        running = self.running
        assert running is not None
        if not running.agreed and running.told and self.own.of_kind(torch.amp.GradScaler):
            self._agree(running)
        if not running.agreed:
            raise ConfigError(
                "@ctx.step: the function returned without optimizer.step(): nothing was agreed on; "
                "a step is a whole global batch: leave out what counts accumulations"
            )
        self._buffers.end()
        self._scales.end()
        self._seed(running, BEHIND_ALL)
        self.running, self.intact = None, True
