"""Weights that nothing trains, by reference: each process has them of its own script.

They are laid out with the others, but are no state: in no snapshot, no checkpoint, no transfer. Of
the state is their digest. Who has others (a base that was loaded wrongly, or drawn anew) is given
them by one that has the job's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ft.engines.modules import local_part
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.own_state import WHOLE_EVERY_STEPS, sum_of_bits
from elastic_ft.errors import ConfigError

LOOKED_AT = 8  # tensors, in each step
Parameters = Callable[[], Iterator[tuple[str, nn.Parameter]]]


class Frozen:
    """To be registered.

    Args:
        parameters: of all modules, by name, as they are now.
        trained: those that some optimizer has.
        keeps: whole copies on the host, to lay them out anew: where they are cut.

    Attributes:
        names: of those that need no gradient, and no optimizer has.
    """

    def __init__(self, parameters: Parameters, trained: set[int], keeps: bool) -> None:
        self._parameters = parameters
        found = [
            (name, parameter)
            for name, parameter in parameters()
            if not parameter.requires_grad and id(parameter) not in trained
        ]
        self.names = frozenset(name for name, _ in found)
        self._whole = {n: p.detach().cpu().clone() if keeps else p.detach() for n, p in found}
        self._keeps = keeps
        self._own = self._wanted = digest_of(self._whole)
        self._watched, self._next = [p for _, p in found], 0
        self._seen = self._marks()

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._wanted = state["digest"]

    def settle(self, rank: int, world_size: int) -> None:
        """All ranks have the job's, laid out. A collective. Raises ConfigError if none has them."""
        has = torch.zeros(world_size, dtype=torch.int64)
        has[rank] = int(self._own == self._wanted)
        dist.all_reduce(has)
        if not has.any():
            raise ConfigError(
                f"the frozen weights are others than the state was trained with (digest "
                f"{self._own}, not {self._wanted}): load the same base"
            )
        if not has.all():
            self._hand_over(int(has.nonzero()[0]), bool(has[rank]))
        self._lay_out()
        self._watched = [p for name, p in self._parameters() if name in self.names]
        self._seen = self._marks()

    def _hand_over(self, source: int, has: bool) -> None:
        devices = {name: parameter.device for name, parameter in self._parameters()}
        with torch.no_grad():
            for name, whole in self._whole.items():
                shared = whole.to(devices[name])
                dist.broadcast(shared, src=source)
                if not has:
                    whole.copy_(shared)
        self._own = digest_of(self._whole)

    def _lay_out(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters():
                if name not in self.names or not isinstance(parameter, DTensor):
                    continue
                mine = state_tensor(parameter)
                inside = zip(mine.box.offsets, mine.box.sizes, strict=True)
                mine.local.copy_(self._whole[name][tuple(slice(o, o + n) for o, n in inside)])

    def whole(self) -> dict[int, torch.Tensor]:
        """Those that are kept whole on the host, by identity of the parameter."""
        if not self._keeps:
            return {}
        return {id(p): self._whole[name] for name, p in self._parameters() if name in self.names}

    def check_unchanged(self) -> None:
        """Raises ConfigError if anything has written to them: it would be lost."""
        if self.has_changed():
            self.refuse()

    def has_changed(self, step: int | None = None) -> torch.Tensor | bool:
        """Whether anything has written to them: to be asked for, unless it is known.

        What torch counts is seen at once. Of what it does not (``.data``, numpy) a few tensors are
        looked at in each step, all of them in steps 1, 2, 4 and so on, and without ``step``.
        """
        versions, sums = self._seen
        whole = step is None or not (step & (step - 1) and step % WHOLE_EVERY_STEPS)
        count = len(self._watched)
        first, looked = (0, count) if whole else (self._next, min(LOOKED_AT, count))
        self._next = (first + looked) % max(count, 1)
        places = [(first + i) % count for i in range(looked)]
        if not places or self._versions() != versions:
            return self._versions() != versions
        found = _sums([self._watched[place] for place in places])
        return (torch.stack(found) != torch.stack([sums[place] for place in places])).any()

    def refuse(self) -> NoReturn:
        raise ConfigError(
            "frozen weights were changed: what needs no gradient and is in no optimizer is "
            "kept by reference; give them to the optimizer, or leave them as they are"
        )

    def _marks(self) -> tuple[list[int], list[torch.Tensor]]:
        return self._versions(), _sums(self._watched)

    def _versions(self) -> list[int]:
        return [local_part(parameter)._version for parameter in self._watched]


def _sums(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Of all their bits, on their devices."""
    return [sum_of_bits(local_part(parameter)) for parameter in parameters]


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same for the same tensors of the same names, wherever they are."""
    hashed = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hashed.update(memoryview(raw.numpy()))
    return hashed.hexdigest()
