"""Named metrics beside the loss: each a sum and a count, which micro-batches and ranks add up.

So a mean is that of the global batch, however unevenly it was dealt. All micro-batches have the
same names: the sums of a step travel in one collective, without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from elastic_ft.errors import ModelError

Pair = tuple[Tensor | float, Tensor | float]
EXPECTED = "expected named metrics as {name: (sum, count)}, numbers or scalar tensors"


def checked(found: Any) -> dict[str, Pair]:
    """Raises ModelError."""
    if not isinstance(found, Mapping):
        raise ModelError(f"{EXPECTED}, found {type(found).__name__}")
    for name, pair in found.items():
        if not isinstance(name, str) or not name:
            raise ModelError(f"{EXPECTED}, found the name {name!r}")
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_number, pair))):
            raise ModelError(f"{EXPECTED}, found {name}: {_in_words(pair)}")
    return {name: (pair[0], pair[1]) for name, pair in found.items()}


class Tally(Protocol):
    """What is counted beside metrics, and summed with them: as many numbers on each rank."""

    def begin(self) -> None: ...

    def queued(self) -> list[Tensor | float]: ...

    def agreed(self, sums: Sequence[float]) -> None:
        """Over all ranks."""


class NamedSums:
    """Over the micro-batches of a step, or of an evaluation.

    Attributes:
        names: in the order of all sums; of the first micro-batch that was added.
        tally: in a step, if there is one.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        self.tally: Tally | None = None
        self._sums: list[Tensor | float] = []

    def begin(self) -> None:
        """A new step: from zero."""
        self._sums = [0.0] * (2 * len(self.names or ()))
        if self.tally is not None:
            self.tally.begin()

    def add(self, found: Mapping[str, Pair], weight: float = 1.0) -> None:
        """Of one micro-batch; of padding (0) the names count alone. Raises ModelError."""
        names = tuple(sorted(found))
        if self.names is None:
            self.names = names
            self._sums = [0.0] * (2 * len(names))
        if names != self.names:
            before, now = (", ".join(each) or "none" for each in (self.names, names))
            raise ModelError(f"named metrics of micro-batches differ: {before}, and then {now}")
        for at, value in enumerate(v for name in names for v in found[name]) if weight else ():
            mine = value.detach().double() if isinstance(value, Tensor) else float(value)
            self._sums[at] = self._sums[at] + mine

    def leave_out(self) -> None:
        """Another rank counts them."""
        self.begin()

    def queued(self) -> list[Tensor | float]:
        """Sum and count of each name, and the tally: what is to be ``fetched``."""
        return [*self._sums, *(() if self.tally is None else self.tally.queued())]

    def sums(self) -> list[float]:
        return fetched(self.queued())

    def take(self, numbers: Sequence[float]) -> None:
        """What was fetched of ``queued``, where there is no tally: nobody asks for it again."""
        self._sums = [*numbers]

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """``sums``: as of ``sums``, added up over ranks. A mean over nothing is left out."""
        named, rest = sums[: 2 * len(self.names or ())], sums[2 * len(self.names or ()) :]
        if self.tally is not None:
            self.tally.agreed(rest)
        pairs = zip(self.names or (), named[::2], named[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}


def fetched(values: Sequence[Tensor | float]) -> list[float]:
    """All numbers of them, in order, with one wait for each device that has any."""
    there: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and is_waited_for(value.device):
            there.setdefault(value.device, []).append(value.reshape(-1).double())
    told = {device: iter(torch.cat(some).tolist()) for device, some in there.items()}
    found: list[float] = []
    for value in values:
        if not isinstance(value, Tensor):
            found.append(float(value))
        elif value.device in told:
            found += islice(told[value.device], value.numel())
        else:
            found += map(float, value.reshape(-1).tolist())
    return found


def is_waited_for(device: torch.device) -> bool:
    """Whether it works on while Python goes on. What does not is asked without a detour."""
    return device.type != "cpu"


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_in_words, value))})"
    return repr(value)
