"""What training state is: named tensors, and of each the box that this rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from elastic_ft.core.sharding import Box


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


# "model.<fqn>", "optim.<fqn>.<key>", "engine.<name>", "comm.<fqn>.residual"; and where a rank's
# part of a tensor takes several boxes, "<name>#01" and so on for those after the first: see
# ``keyed``.
LocalState = Mapping[str, StateTensor]


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
