"""A training loop's own module and optimizer, laid out in place: they stay the user's objects.

What a step does is the user's function; this gives it what it must not know: which micro-batches
are this rank's, when gradients are reduced, by what they are divided, and the agreement before the
first optimizer steps (I4), from the optimizer's own hook. Whole on every rank (DDP) or cut in place
(``engines.own_cut``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_ft import torch_private
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines import own_cut, own_stale, own_watch
from elastic_ft.engines.laid_out import LaidOut
from elastic_ft.engines.modules import in_ddp
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.optimizer_state import OptimizerState
from elastic_ft.engines.own_buffers import (
    check_batch_norms,
    persistent_places,
)
from elastic_ft.engines.own_forward import Routed, Whole
from elastic_ft.engines.own_frozen import Frozen
from elastic_ft.engines.own_state import Hyper
from elastic_ft.engines.own_step import OwnStep
from elastic_ft.engines.unused import use_all
from elastic_ft.errors import ConfigError
from elastic_ft.groups.groups import Groups
from elastic_ft.groups.waits import WAITS
from elastic_ft.models.build import block_modules
from elastic_ft.state.tensors import LocalState, StateTensor


class OwnEngine(OwnStep):
    """See ``engines.base.Engine``; it has no ``run_batch``: ``attempt`` and the user's function
    make a step.
    """

    # ------------------------------------------------------------------------ what there is

    def prepare(self) -> None:
        """Raises ConfigError, one line, for what can't be carried."""
        torch_private.forget_meshes()
        check_batch_norms(self.models)
        for number, model in enumerate(self.models):
            model.to(self.device)
            self._persistent_at += persistent_places(model, _prefix(number))
        parameters = dict(self._parameters())
        self._trainable = {p for p in parameters.values() if p.requires_grad}
        owners = {id(p): name for name, p in parameters.items()}
        for number, optimizer in enumerate(self.optimizers):
            if any(optimizer.state.values()):
                raise ConfigError(
                    "prepare: the optimizer has stepped already, or has loaded the state of one "
                    "that has: prepare it before its first step, and leave out what loads the "
                    "script's own checkpoint (the job goes on from its own)"
                )
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            if any(id(p) not in owners for p in mine):
                raise ConfigError(
                    "prepare: the optimizer has parameters of no module that was prepared: give "
                    "all modules that are trained"
                )
            named = {owners[id(p)]: p for p in mine}
            self._kept.append(OptimizerState(_shared(optimizer), named))
            self.own.register(f"optimizer{number or ''}", Hyper(optimizer))
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        for number, model in enumerate(self.models):
            if self.job.parallel.unused_parameters:
                use_all(model, block_modules(model) if self._is_cut else [])
            if not self._is_cut:
                self._routed[number] = Routed(model, partial(self._runners.get, number))
                model.forward = self._routed[number]
        if self.by_reference:
            trained = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
            self._frozen = Frozen(self._parameters, trained, keeps=self._is_cut)
            self.own.register("frozen weights", self._frozen)
        whole = ((n, t) for n, t in self._whole_model() if not self._is_frozen(n))
        self._initial = {name: tensor.detach().cpu().clone() for name, tensor in whole}

    def whole_state(self, model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
        """See ``own_cut.whole_state``. Raises GroupBroken."""
        kept = self._frozen.whole() if self._frozen is not None else {}
        found = own_cut.whole_state(model, rank, kept)
        if self._is_cut:  # somebody is about to write it
            self.check_groups()
        return found

    def _is_frozen(self, name: str) -> bool:
        return self._frozen is not None and name in self._frozen.names

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{_prefix(number)}{name}", parameter

    def _whole_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._parameters()
        yield from self._persistent()

    # --------------------------------------------------------------------------- the layout

    def keeps(self, layout: Layout) -> bool:
        return not self._is_cut and self._replicated

    def attach(self, groups: Groups) -> bool:
        kept = self.keeps(groups.assignment.layout)
        self._groups = groups
        if not self.own.tensors:
            if self._frozen is not None:  # the script may have loaded others since
                self._frozen.check_unchanged()
            self.capture()
            self._initial |= {name: tensor.clone() for name, tensor in self.own.tensors.items()}
        self._cut(groups) if self._is_cut else self._wrap()
        self._replicated = not self._is_cut
        blocks = [block for model in self.models for block in block_modules(model)]
        parameters = dict(self._parameters())
        self._listed = list(parameters.values())
        self._trained = [dict(model.named_parameters()) for model in self.models]
        self._laid_out = LaidOut(self.models, blocks, parameters, {**parameters}, {}, self._kept[0])
        return kept

    def _wrap(self) -> None:
        """As they were prepared: a loop may have a model's parameters frozen for a moment, and DDP
        would never reduce their gradients."""
        now = {p: p.requires_grad for _, p in self._parameters()}
        for parameter in now:
            parameter.requires_grad_(parameter in self._trainable)
        try:
            self._wrap_each()
        finally:
            for parameter, was in now.items():
                parameter.requires_grad_(was)

    def _wrap_each(self) -> None:
        for number, model in enumerate(self.models):
            if any(p.requires_grad for p in model.parameters()):
                self._runners[number] = WAITS.watch(in_ddp(Whole(model), self.device))

    def _cut(self, groups: Groups) -> None:
        assert groups.mesh is not None
        for name in groups.mesh.mesh_dim_names or ():
            group = groups.mesh.get_group(name)
            torch_private.set_group_timeout(group, groups.operation_timeout_s)
        stale: list[nn.Parameter] = []
        for model in self.models:
            moved = own_cut.cut_in_place(self.job, model, groups, self.device)
            own_cut.follow(self.optimizers, moved)
            stale += moved
        self._told_last = None
        names = {id(p): name for name, p in self._parameters()}
        self._kept = []
        for optimizer in self.optimizers:
            optimizer.state.clear()  # of the cut before: it comes back through the transfer
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            self._kept.append(OptimizerState(_shared(optimizer), {names[id(p)]: p for p in mine}))
        own_stale.leave(stale)
        self._gathering = own_cut.gathering(self.models)

    def detach(self, in_use: list[object] | None = None) -> LocalState:
        whole = all(kept.whole for kept in self._kept) and self._laid_out is not None
        if self._is_cut and self._laid_out is not None:
            for model in self.models:
                own_cut.undo_cut(model)
        state = self.state() if whole else {}
        if self._is_cut:  # registered objects are captured into these again and again
            own = {*self.own.tensors, *(f"model.{name}" for name in self._buffers.kept)}
            state = {n: t if n not in own else _copied(t) for n, t in state.items()}
        self._replicated = self._replicated and whole
        WAITS.forget()  # what a thread that is left behind still uses is asked nothing more
        runners, self._groups = dict(self._runners), None
        self._runners.clear()
        self.running = None
        for _, parameter in self._parameters():
            parameter.grad = None
        if in_use is not None:
            in_use += [runners, self._laid_out]
        else:
            for runner in runners.values():  # their hooks sit on parameters that stay
                runner.reducer = None
                runner.logger = None
        self._laid_out = None
        return state

    def gradients_seen(self) -> Any:
        """For ``check_gradients``; see ``own_watch``."""
        return (own_watch.probe if self._is_cut else own_watch.versions)(self._listed)

    def check_gradients(self, seen: Any) -> None:
        """Raises ConfigError if they are not as they were; of what is cut the step's agreement
        does, which waits for the device anyway."""
        now = self.gradients_seen()
        if isinstance(seen, torch.Tensor) and isinstance(now, torch.Tensor):
            assert self.running is not None
            self.running.cleared.append(own_watch.is_other(now, seen))
        elif isinstance(seen, torch.Tensor) or isinstance(now, torch.Tensor) or now != seen:
            own_watch.refuse_cleared()

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        return 0 if self._replicated else max(dealt)

    # ---------------------------------------------------------------------------- the state

    def capture(self) -> None:
        """What the registered objects and buffers are now belongs to the step that was made."""
        for part in self._gathering:
            part.reshard()
        self.own.capture()
        self._buffers.capture()

    def state(self) -> LocalState:
        return {name: state_tensor(tensor) for name, tensor in self._sources()}

    def _sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters():
            if self._is_frozen(name):
                continue
            yield f"model.{name}", parameter
            for number, kept in enumerate(self._kept):
                for key, value in kept.of(name):
                    yield f"optim{number or ''}.{name}.{key}", value
        for number, kept in enumerate(self._kept):
            for name, value in kept.of_groups():
                yield f"engine{number or ''}.{name}", value
        for name, buffer in self._buffers.kept.items():
            yield f"model.{name}", buffer
        yield from self.own.tensors.items()

    def initialise(self) -> None:
        """Rank 0's model, as it was prepared, and its registered objects are everybody's."""
        if not self._initial:
            raise ConfigError("the initial state is gone, and no later one was found")
        with torch.no_grad():
            for name, tensor in self.state().items():
                whole = self._initial.get(name.removeprefix("model."))
                if not name.startswith(("model.", "user")):
                    continue
                shared = (tensor.local if whole is None else whole).to(self.device)
                dist.broadcast(shared, src=0)
                inside = zip(tensor.box.offsets, tensor.box.sizes, strict=True)
                tensor.local.copy_(shared[tuple(slice(o, o + n) for o, n in inside)])
        for kept in self._kept:
            kept.clear()

    def forget_initial(self) -> None:
        """A later state has a copy: nobody begins anew with this process."""
        self._initial = {}

    def restored(self) -> None:
        """Also where all is in place: a step begun in vain has moved what is registered."""
        for kept in self._kept:
            kept.restored()
        self._scales.put_back(self.own.of_kind(torch.amp.GradScaler))
        self._buffers.put_back()
        self.own.put_back(self._groups.assignment.source.step if self._groups is not None else 0)
        if self._frozen is not None:
            assert self._groups is not None and self._groups.rank is not None
            self._frozen.settle(self._groups.rank, self._groups.world_size)
        for _, parameter in self._parameters():
            parameter.grad = None


def _prefix(number: int) -> str:
    return f"m{number}." if number else ""


def _copied(tensor: StateTensor) -> StateTensor:
    return replace(tensor, local=tensor.local.clone())


def _shared(optimizer: torch.optim.Optimizer) -> Callable[[Mapping[str, nn.Parameter]], Any]:
    """Makes the user's own optimizer the first time, and then copies with its parameters."""
    given: list[torch.optim.Optimizer] = []

    def make(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        if not given:
            given.append(optimizer)
            return optimizer
        return copy.deepcopy(optimizer, {id(p): p for p in parameters.values()})

    return make
