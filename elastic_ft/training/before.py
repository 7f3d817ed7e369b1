"""What a loop of one's own gives to its job before the first batch."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from elastic_ft.data.epoch_order import EpochOrder
from elastic_ft.engines.own import OwnEngine
from elastic_ft.errors import ConfigError
from elastic_ft.training.between import Between
from elastic_ft.training.each import MicroTurns, ZeroGrad
from elastic_ft.training.found import found_for
from elastic_ft.training.given import LATE, Given, check_complete, check_new, sort_out
from elastic_ft.training.held_out import HeldOut
from elastic_ft.training.loader import (
    Loader,
    bundle_of,
    check_options,
    drawn_bundle,
    read_in_processes,
)
from elastic_ft.training.variables import Variable, running_frames
from elastic_ft.worker.steering import Steering
from elastic_ft.worker.worker import Worker


class BeforeSteps(Between, ABC):
    """That part of a ``Context``, which says what its attributes are."""

    device: torch.device
    worker: Worker
    _own: Steering | None
    _loader: Loader | None
    _turn: MicroTurns | None
    has_begun: bool

    def prepare(
        self,
        *things: Any,
        seed: int | Literal["job's"] | None = "job's",
        by_reference: bool = False,
    ) -> Any:
        """Takes models, optimizers, schedulers and a DataLoader, in any order, at once or one after
        the other. Of several loaders that which says shuffle=True is trained on, or else the first.

        Returns them in that order: the same objects, but for loaders: each item of the one that is
        trained on is a ``Batch``; the others give what they gave, on ``device``. Models are moved
        there. Raises ConfigError. Without a DataLoader the script draws each micro-batch itself,
        from the generators of torch, numpy or ``random``.

        A text is the name of a variable of the calling function, or its module, and is not
        returned: numbers, text, tensors, lists and dicts of them, the same on all ranks, are kept
        as what ``register`` is given; they are set where the state comes from elsewhere.

        by_reference: what needs no gradient and is in no optimizer is no state: every process has
        it of its script, or else of another; it must not be changed.
        seed: of each micro-batch, with its place in the global batch. None: nothing is seeded; of a
        job of one worker alone, which registers its generators, the same is drawn again.
        """
        if self.has_begun:
            raise ConfigError(f"ctx.prepare: {LATE}")
        names = [thing for thing in things if isinstance(thing, str)]
        things = tuple(thing for thing in things if not isinstance(thing, str))
        given = sort_out(things, self._loader)
        check_new(given, self._own.kept if self._own is not None else [])
        trained = None if given.loader is None else self._made_of(given.loader)
        if self._own is None:
            engine = OwnEngine(self.job, [], [], self.device)
            self._own = self.worker.own = Steering(engine, drawn_bundle())
        engine = self._own.engine
        engine.by_reference |= by_reference
        if seed != "job's":
            engine.seed = seed
        self._take(given)
        if trained is not None:
            self._take_loader(given.loader, trained)
        for name in names:
            engine.own.register(name, Variable(sys._getframe(1), name))
        made = given.made_of(things, self._loader, lambda held_out: HeldOut(self, held_out))
        return made[0] if len(made) == 1 else tuple(made)

    setup = setup_module = setup_optimizers = setup_dataloaders = prepare
    prepare_model = prepare_optimizer = prepare_data_loader = prepare_scheduler = prepare

    def _take(self, given: Given) -> None:
        engine = self._steering("prepare").engine
        engine.models += given.models
        engine.optimizers += given.optimizers
        for place, thing in given.kept.items():
            while (name := f"prepared{place}") in engine.own.names:
                place += 1
            engine.own.register(name, thing)
        for owner in (*given.optimizers, *given.models):
            owner.zero_grad = ZeroGrad(  # type: ignore[method-assign]
                owner, lambda: bool(self._turn and self._turn.keeps_gradients)
            )
        for model in given.models:
            if not hasattr(model, "no_sync"):  # DDP's: a step's micro-batches are accumulated
                model.no_sync = nullcontext

    def _made_of(self, given: DataLoader[Any] | Loader) -> Loader:
        """Raises ConfigError."""
        if isinstance(given, Loader):
            return given
        check_options(given, self.job.batch)
        return self.loader(given.dataset, given.collate_fn)

    def _take_loader(self, given: DataLoader[Any] | Loader | None, made: Loader) -> None:
        own, self._loader = self._steering("prepare"), made
        if made.bundle.stream is not None:
            own.engine.own.register("the stream", made.bundle.stream)
        if isinstance(given, DataLoader):
            read_in_processes(made, given, own.engine.seed)
        own.data = made.bundle

    def register(self, **objects: Any) -> None:
        """What these keep (``state_dict``, ``load_state_dict``, or their attributes) belongs to the
        job's state: it is committed with each step, rolled back with it, and given to who joins.

        It must be the same on all ranks. Raises ConfigError.
        """
        engine = self._steering("register").engine
        for name, thing in objects.items():
            engine.own.register(name, thing)

    def loader(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        order: EpochOrder | None = None,
        shuffle_buffer: int = 0,
    ) -> Loader:
        """A dataset, dealt in micro-batches of ``batch.micro_batch_size``. Raises ConfigError.

        Args:
            order: of a map-style one's samples, the same on all ranks; else they are shuffled by
                ``seed``. One that is iterated over has its own (``elastic_ft.data.stream``).
            shuffle_buffer: of such a stream: samples of a virtual shard that are shuffled together.
        """
        bundle = bundle_of(dataset, collate_fn, self.job.batch, self.job.seed, shuffle_buffer)
        return Loader(self, replace(bundle, order=order))

    def _begin(self) -> None:
        """Nothing is prepared or registered from now on. Raises ConfigError."""
        own = self._steering("prepare")
        check_complete(own.engine.models, own.engine.optimizers)
        for name, thing in found_for(own.engine.optimizers, own.kept):
            own.engine.own.register(name, thing)
        running = running_frames()
        for variable in own.engine.own.of_kind(Variable):
            variable.check_runs(running)
        self.has_begun = True
