"""The engine seam: how a model is laid out over ranks, and how one global batch is run.

The loop, the snapshots, the transfer and the controller see an engine only through this protocol.
Nothing outside an engine may assume how state is cut: it is a set of named tensors, and of each
this rank holds one box.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_ft.core.sharding import Box
from elastic_ft.runtime.groups import Groups

# (point, step=None): announces a named point, see runtime.faults. With the step: more of the same
# point, once per micro-batch, so that many of them are no hang.
Reach = Callable[..., None]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """This rank's part of one tensor of the training state.

    Attributes:
        shape: of the whole (unsharded) tensor.
        box: which part of it ``local`` is; empty boxes are allowed.
        local: plain tensor of ``box.sizes``; aliases the memory that training uses.
        volatile: a forward changes it (a buffer), not only the optimizer.
    """

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    volatile: bool = False

    @property
    def dtype(self) -> str:
        """torch's name without the prefix, e.g. "float32"."""
        return str(self.local.dtype).removeprefix("torch.")


# "model.<fqn>", "optim.<fqn>.<key>", "engine.<name>"; and where a rank's part of a tensor takes
# several boxes, "<name>#01" and so on for those after the first: see ``keyed``.
State = Mapping[str, StateTensor]


def keyed(pieces: Iterable[tuple[str, StateTensor]]) -> dict[str, StateTensor]:
    """The state that has these boxes of the tensors named, in the order given."""
    state: dict[str, StateTensor] = {}
    seen: Counter[str] = Counter()
    for name, piece in pieces:
        state[f"{name}#{seen[name]:02}" if seen[name] else name] = piece
        seen[name] += 1
    return state


def tensor_name(key: str) -> str:
    """The tensor of which a state's ``key`` is a part."""
    return key.partition("#")[0]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together. ``weight`` 0: padding, no effect on anything."""

    number: int  # within the global batch; seeds per-sample randomness (I3)
    data: Any
    weight: float = 1.0
    ids: tuple[int, ...] = ()  # of its samples, as they were read; none are known in evaluation


@dataclass(frozen=True, slots=True)
class Update:
    """What applying the gradients did."""

    grad_norm: float  # global, before clipping
    skipped: bool = False  # the gradients were not finite: nothing was applied
    note: str = ""  # for the journal: why, where that is not as usual


class Engine(Protocol):
    """Attributes:
    intact: the live state is that of one step: False while an optimizer step is under way.
    can_be_left: ``detach`` can do without the thread that is in a collective for good.
    """

    intact: bool
    can_be_left: bool

    def prepare(self) -> None:
        """Whatever can be done before there is a group: imports, the model on meta."""

    def attach(self, groups: Groups) -> bool:
        """Lays the model out over ``groups``.

        Returns True when the state of before is still in place, False when it must be filled in
        (``state()`` then lists uninitialised tensors).
        """

    def detach(self, in_use: list[object] | None = None) -> State:
        """Drops all that is bound to the groups. Returns this rank's state as plain tensors that
        stay valid and unchanged until the next ``attach`` has been followed by a step.

        ``in_use``: given where a thread is still inside the model, for good: takes what it uses,
        which is then neither freed nor used again here."""

    def state(self) -> State:
        """This rank's part of the training state, aliasing the live memory."""

    def initialise(self) -> None:
        """Fills the state of step 0 from the seed or ``model.weights``, equal in every layout."""

    def restored(self) -> None:
        """The state was filled from outside: refresh what is derived from it."""

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The repeated layers that this rank runs, once attached; none if nothing repeats."""

    def micro_batches_per_rank(self, dealt: Sequence[int]) -> int:
        """How many micro-batches each rank must run, given how many each was dealt."""

    def run_batch(
        self, step: int, micro_batches: Sequence[MicroBatch], reach: Reach
    ) -> tuple[float, int]:
        """Runs forward and backward, gradients reduced. Returns this rank's (loss sum, tokens)."""

    def square_norm(self) -> float:
        """This rank's share of the squared norm of all gradients, before they are scaled; 0.0 where
        the optimizer's step finds the norm by itself. Every collective that makes gradients is
        done once this returns (I4). Raises GroupBroken if one was aborted."""

    def apply(self, step: int, tokens: int, squares: float, reach: Reach) -> Update:
        """Clips and applies the optimizer. ``tokens`` and ``squares`` (see ``square_norm``) are
        summed over the world."""

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """Returns this rank's (loss sum, tokens) without gradients."""
