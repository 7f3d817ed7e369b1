"""What a loop of one's own does between two steps, with all ranks: evaluations, exports."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic_ft.config import Job
from elastic_ft.engines.left_behind import stays_inside
from elastic_ft.errors import UsageError
from elastic_ft.training.batch import weighed
from elastic_ft.training.elsewhere import Elsewhere, write_state
from elastic_ft.training.export import export
from elastic_ft.training.held_out import evaluating, samples_of
from elastic_ft.training.here import as_here
from elastic_ft.worker.agreement import sum_over_members
from elastic_ft.worker.by_user import step_aside, summed
from elastic_ft.worker.evaluating import Mean, evaluate
from elastic_ft.worker.loop import Loop
from elastic_ft.worker.party import Party
from elastic_ft.worker.steering import Done, Steering


class Between(Elsewhere, ABC):
    """That part of a ``Context``, which says what its attributes are."""

    job: Job
    _place: tuple[int, int] | None  # rank and size of the world, once there is one
    _inside: bool
    _party: Party | None  # that runs an errand

    @abstractmethod
    def _steering(self, what: str) -> Steering: ...

    @abstractmethod
    def _next(self) -> Any: ...

    @property
    def rank(self) -> int:
        """Raises UsageError before there is a world."""
        return self._placed("rank")[0]

    @property
    def world_size(self) -> int:
        """Raises UsageError before there is a world."""
        return self._placed("world_size")[1]

    def _placed(self, what: str) -> tuple[int, int]:
        if self._place is None:
            raise UsageError(
                f"ctx.{what}: there is none before the first batch, and others later, as workers "
                "come and go: ask for it inside the loop, each time, or in ctx.on_generation"
            )
        return self._place

    def evaluate(
        self,
        function: Callable[[Any], Any],
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str = "held-out loss",
    ) -> Mean:
        """The mean over ``dataset``, dealt to all ranks, of ``function(micro_batch)``, which
        returns (sum, count), and {name: (sum, count)} of what comes as ``metrics`` of the mean. It
        is tried again where the world breaks under it. Of a DataLoader its dataset and
        ``collate_fn`` are taken."""
        own = self._steering("evaluate")
        held_out, here = samples_of(dataset, collate_fn), as_here(function)

        def run(loop: Loop) -> Mean:
            with evaluating(own.engine.models):
                found = functools.partial(summed, lambda micro: here(weighed(micro, own.engine)))
                return evaluate(loop, found, held_out, len(held_out), name)

        found: Mean = self._errand(run)
        return found

    def save(self, *file: Any) -> None:
        """Asks for a checkpoint of the next step, beside those that ``checkpoint`` asks for. Given
        a path and what is kept, as Fabric's, or the other way round, as Accelerate's: rank 0 writes
        that there, by ``torch.save``; nobody reads it again by itself."""
        if not file:
            self._steering("save").checkpoint = True
        elif len(file) != 2 or not any(isinstance(part, str | os.PathLike) for part in file):
            raise UsageError("ctx.save: takes nothing, or a path and what is written there")
        elif self.rank == 0:
            write_state(*sorted(file, key=lambda part: not isinstance(part, str | os.PathLike)))

    def gathered(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole ``model.state_dict()`` on the host, whatever the layout: on rank 0, and {}
        elsewhere. All ranks call it, between two steps. Frozen weights that are kept by reference
        are given, not copied: leave them as they are."""
        found: dict[str, torch.Tensor] = self._errand(lambda _: self.whole_state(model))
        return found

    def whole_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """As ``gathered``, in what ``together`` runs."""
        return self._steering("gathered").engine.whole_state(model, self.rank)

    def export(self, model: nn.Module, folder: str | Path) -> None:
        """Writes the model's weights as safetensors, by ``save_pretrained`` where it has that."""
        export(self, model, folder)

    def together(self, function: Callable[[Callable[[], None]], Any]) -> Any:
        """Between two steps: what ``function(progress)`` returns, called on all ranks.

        Collectives are allowed in it. It is called again, with another ``rank`` and
        ``world_size``, where the world breaks under it. ``progress()`` says that nothing hangs.
        """
        here = as_here(function)
        return self._errand(lambda loop: here(loop.progress))

    def sum(self, *values: float) -> list[float]:
        """Each value's sum over all ranks, in float64, in a step's function, before its
        ``clip_grad_norm_``, or in what ``together`` runs."""
        if self._party is not None:
            return self._party.sum(values)
        with stays_inside():
            return sum_over_members(list(map(float, values)), self.world_size)

    def all_gather(self, tensor: Any) -> Any:
        """Each rank's, of one shape and dtype, in what ``together`` runs. Elsewhere between two
        steps as ``gather``, of one rank."""
        if self._party is None:
            return self.gather(torch.as_tensor(tensor))[None]
        return self._party.all_gather(tensor)

    def _errand(self, run: Callable[[Any], Any]) -> Any:
        own = self._steering("evaluate")
        if self._inside:
            raise UsageError("ctx.evaluate, gathered, export: come between two steps, not in one")
        is_before = own.at.is_new and not own.at.has_asked
        if is_before and self._is_cut and self.job.elastic.max_workers > 1:
            raise UsageError(
                "ctx.evaluate, gathered, export before the first batch: who joins later comes to "
                "it alone, and can't make it of a model that is cut: put it into the loop, where "
                "all come to it together"
            )
        while True:
            own.errand = functools.partial(self._by_party, run)
            item = self._next()
            if isinstance(item, Done):
                return item.result

    def _by_party(self, run: Callable[[Loop], Any], loop: Loop) -> Any:
        """Its ranks are this context's meanwhile."""
        if self._is_cut:
            needed = self.job.elastic.min_workers
            loop.party.need_whole(needed, functools.partial(step_aside, loop))
        before, self._party = self._place, loop.party
        self._place = loop.party.rank, loop.party.world_size
        try:
            return run(loop)
        finally:
            self._party, self._place = None, before

    @property
    def _is_cut(self) -> bool:
        return self.job.parallel.strategy != "ddp"
