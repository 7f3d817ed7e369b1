"""Numbers that travel along with a step's gradients, in DDP's own sums (docs/adr/0010).

Where all ranks have all of the state, what else they settle in a step is known before its last
backward, and the norm afterwards is the same everywhere. So these numbers are the gradient of one
more parameter, which is no part of the model: each rank has a row, and zeros for the others', and
each number is four of 16 bits, that float32 carries exactly. Who has a whole sum of gradients has
them all, to the last bit; who has not has neither, and applies nothing (I4).

On a GPU they would have to be known before the backward that is queued behind them: it would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_ft.engines.modules import TermCounts
from elastic_ft.errors import ModelError
from elastic_ft.groups.groups import Groups

MEMBERS_MAX = 64
NUMBERS_MAX = 64  # of each member; the first says how many follow
WORDS = 4  # of a number
NAME = "numbers_along"

# (loss sum, tokens) of this rank -> what it has to say; as many numbers on each.
Say = Callable[[float, int], list[float]]


class Along:
    """Attributes:
    is_told: numbers have come along with the gradients of the last backward.
    """

    def __init__(self, rank: int, members: int) -> None:
        self._rank, self._members = rank, members
        shape, exact = (members, NUMBERS_MAX * WORDS), {"dtype": torch.float32, "device": "cpu"}
        self._carrier = nn.Parameter(torch.zeros(shape, **exact))  # type: ignore[arg-type]
        self._words = torch.zeros_like(self._carrier)  # what its gradient is, of this rank
        self._own_words = self._words.numpy()[rank]
        self._say: Say | None = None
        self._told: list[list[float]] = []  # of each member
        self.is_told = False

    def wrap(
        self, module: nn.Module, make: Callable[[], DistributedDataParallel]
    ) -> DistributedDataParallel:
        """Returns what ``make`` makes of ``module``, which sums the numbers, too."""
        module.register_parameter(NAME, self._carrier)
        try:
            return make()
        finally:
            delattr(module, NAME)

    def ask(self, say: Say | None) -> None:
        """The next step's last backward carries what ``say`` returns then; None: zeros."""
        self._say, self.is_told = say, False

    def backward(self, loss: Tensor, total: float, tokens: int) -> None:
        """A step's last. ``total``, ``tokens``: of this rank, ``loss`` included.

        Raises ModelError, on all members alike, where they have not as many numbers to tell."""
        said = self._say(total, tokens) if self._say is not None else []
        self._say, mine = None, np.array([len(said), *said][:NUMBERS_MAX], np.float64)
        self._own_words[:] = 0.0
        self._own_words[: len(mine) * WORDS] = mine.view(np.int16)
        self._carrier.grad = None
        torch.autograd.backward((loss, self._carrier), (None, self._words))
        self._hear(self._carrier.grad)

    def _hear(self, mean: Tensor | None) -> None:
        assert mean is not None
        words = np.rint(mean.numpy() * self._members).astype(np.int16)
        counts, *numbers = zip(*words.view(np.float64).tolist(), strict=True)
        if len({*counts}) > 1:
            raise ModelError(
                "ranks have another number of sums to tell in a step "
                f"({', '.join(f'{count:.0f}' for count in counts)}): the named metrics of a model "
                "are the same in every micro-batch"
            )
        count = int(counts[0])
        self.is_told, self._told = 0 < count < NUMBERS_MAX, [[*one] for one in numbers[:count]]

    def told(self) -> list[float]:
        """The sum of each number over all members, in float64, in their order, so that it is the
        same on each to the last bit."""
        assert self.is_told
        return [reduce(add, one) for one in self._told]


def run_backward(
    loss: Tensor, along: Along | None, total: Tensor | float, tokens: TermCounts
) -> None:
    """Of a micro-batch; ``along``: of a step's last one, if numbers can travel with it."""
    if along is None:
        loss.backward()
    else:
        along.backward(loss, float(total), tokens.total())


def along_of(groups: Groups, device: torch.device) -> Along | None:
    """None where numbers can't travel so."""
    if groups.rank is None or device.type != "cpu" or not 1 < groups.world_size <= MEMBERS_MAX:
        return None
    return Along(groups.rank, groups.world_size)
