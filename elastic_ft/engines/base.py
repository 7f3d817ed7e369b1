"""The engine seam: how a model is laid out over ranks, and how one global batch is run.

The loop, the snapshots, the transfer and the controller see an engine only through this protocol.
Nothing outside an engine may assume how state is cut: it is a set of named tensors, and of each
this rank holds one box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines.along import Along
from elastic_ft.engines.by_reference import Reference
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.models.named import NamedSums
from elastic_ft.state.tensors import LocalState


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together. ``weight`` 0: padding, no effect on anything."""

    number: int  # within the global batch; seeds per-sample randomness (I3)
    data: Any
    weight: float = 1.0
    ids: tuple[int, ...] = ()  # of its samples, as they were read; none are known in evaluation


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Of one rank's micro-batches, all of whose gradients are reduced.

    Attributes:
        loss, tokens, named: nothing where they came along with the gradients (``engines.along``).
        squares: this rank's share of the squared norm of all gradients, before they are scaled; all
            of it where numbers came along; 0.0 where the optimizer's step finds the norm by itself.
        named: see ``NamedSums.sums``.
    """

    loss: float
    tokens: int
    squares: float
    named: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Graphs of layers that a worker has compiled, or found in its node's cache."""

    graphs: int  # in a step, which took longer for it
    warmed: int  # before the first one
    warmed_s: float


@dataclass(frozen=True, slots=True)
class Update:
    """What applying the gradients did."""

    grad_norm: float  # global, before clipping
    skipped: bool = False  # the gradients were not finite: nothing was applied
    note: str = ""  # for the journal: why, where that is not as usual
    compiled: Compiled | None = None  # in this step, if anything was
    metrics: Mapping[str, float] = field(default_factory=dict)  # named, over the global batch


class StateEngine(Protocol):
    """What has the state of a world's rank, whoever makes its steps.

    Attributes:
    device: that it is on.
    intact: the live state is that of one step: False while an optimizer step is under way.
    can_be_left: ``detach`` can do without the thread that is in a collective for good.
    reference: the frozen weights that are no state; None if there are none.
    experts: of each of the model's layers, that ranks can share out, once prepared; 0: none.
    """

    device: torch.device
    intact: bool
    can_be_left: bool
    experts: int
    reference: Reference | None

    def prepare(self) -> None:
        """Whatever can be done before there is a group: imports, the model on meta."""

    def keeps(self, layout: Layout) -> bool:
        """Whether ``attach`` to such a layout would find the state of before in place."""

    def attach(self, groups: Groups) -> bool:
        """Lays the model out over ``groups``.

        Returns True when the state of before is still in place, False when it must be filled in
        (``state()`` then lists uninitialised tensors, and ``reference`` has targets).
        """

    def detach(self, in_use: list[object] | None = None) -> LocalState:
        """Drops all that is bound to the groups. Returns this rank's state as plain tensors that
        stay valid and unchanged until the next ``attach`` has been followed by a step.

        ``in_use``: given where a thread is still inside the model, for good: takes what it uses,
        which is then neither freed nor used again here."""

    def state(self) -> LocalState:
        """This rank's part of the training state, aliasing the live memory."""

    def initialise(self) -> None:
        """Fills the state of step 0 from the seed or ``model.weights``, equal in every layout.
        Raises StateUnreadable of the generation's source where the latter can't be had."""

    def restored(self) -> None:
        """The state was filled from outside: refresh what is derived from it."""

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The repeated layers that this rank runs, once attached; none if nothing repeats."""

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        """How many micro-batches each rank must run, given how many each was dealt."""


class Engine(StateEngine, Protocol):
    """A job's model, which it runs itself.

    Attributes:
    named: this rank's sums of what the model returns beside its loss, of the batch run last.
    along: what can travel along with gradients; None, once attached: nothing can.
    base_digest: of the folder that the model begins with, as the run knows it; None: it does not.
    """

    named: NamedSums
    base_digest: str | None
    along: Along | None

    def run_batch(self, step: int, micro_batches: Sequence[MicroBatch], reach: Reach) -> BatchSums:
        """Runs forward and backward. Every collective that makes gradients is done once this
        returns (I4): it waits for the device once, behind all that a step has for it by then.
        Raises GroupBroken if a collective was aborted."""

    def apply(self, step: int, tokens: int, squares: float, reach: Reach) -> Update:
        """Clips and applies the optimizer. ``tokens`` and ``squares`` (see ``BatchSums``) are
        summed over the world."""

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int, NamedSums]:
        """Returns this rank's (loss sum, tokens, named sums) without gradients."""

    def share_residuals(self, progress: Callable[[], None]) -> None:
        """Between two steps: what replicas have each a part of is summed, and all have the sum
        (``engines.replica_comm``): the state of one then stands for all. A collective, in pieces:
        ``progress`` is called after each, and may raise GroupBroken."""
