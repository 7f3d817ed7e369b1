"""Who runs together what comes between two steps: mostly all members of a generation.

A generation may begin with some in the middle of an evaluation or an export that broke, and with
others who know nothing of it: they came in for the lost, have it behind them, or are in a step that
is made again. Those do not wait for them in the default group's collectives, where one's gradients
would meet another's losses: each party has its own, over the store, until its next step.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from elastic_ft.errors import GroupBroken, UsageError
from elastic_ft.groups.groups import Groups
from elastic_ft.worker.agreement import sum_over_members

IN_STEP = -1.0  # in its function, which is called again


def place(errands: int, pending: bool, in_step: bool) -> float:
    """Where a member is between its steps: equal for those who come to the same errands."""
    return IN_STEP if in_step else 2.0 * errands + pending


def furthest(places: Sequence[float]) -> int | None:
    """A rank that has gone furthest from the last step; None if all are at one place."""
    if len(set(places)) == 1:
        return None
    return places.index(IN_STEP if IN_STEP in places else max(places))


class Party:
    """Attributes:
    rank, world_size: of this member, in it.
    is_whole: all members are in it.
    """

    def __init__(self, groups: Groups, places: Sequence[float] = ()) -> None:
        assert groups.rank is not None
        self._groups, self._said = groups, 0
        own = places[groups.rank] if places else 0.0
        everyone = range(groups.world_size)
        self._ranks = [rank for rank in everyone if not places or places[rank] == own]
        self.rank, self.world_size = self._ranks.index(groups.rank), len(self._ranks)
        self.is_whole = self.world_size == groups.world_size

    def check_whole(self) -> None:
        """Raises UsageError: of a model that is cut, all members have to be there."""
        if not self.is_whole:
            raise UsageError(
                "a worker was lost between two steps, and who came in for it can't take part in "
                "the evaluation or export that is made again, as the model is cut: set "
                "elastic.min_workers below max_workers, and no spares, or parallel.strategy: ddp"
            )

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value's sum, in float64, the same on each member."""
        own = list(map(float, values))
        if self.is_whole:
            return sum_over_members(own, self.world_size)
        gathered = self._exchanged(torch.tensor(own, dtype=torch.float64))
        return [float(value) for value in torch.stack(gathered).sum(0)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each member's, of one shape."""
        if not self.is_whole:
            return [found.to(tensor.device) for found in self._exchanged(tensor)]
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.contiguous())
        return found

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Over the store, whatever the others do. Raises GroupBroken.

        Each member deletes its word of the exchange before: who has answered this one has read it.
        """
        if tensor.numel() == 0:
            return [tensor.detach().cpu()] * self.world_size
        self._said += 1
        own, store = tensor.detach().cpu().contiguous(), self._groups.store
        assert store is not None
        timeout = datetime.timedelta(seconds=self._groups.operation_timeout_s)
        try:
            store.set(self._key(self.rank), own.reshape(-1).view(torch.uint8).numpy().tobytes())
            keys = [self._key(rank) for rank in range(self.world_size)]
            store.wait(keys, timeout)
            said = [store.get(key) for key in keys]
            if self._said > 1:
                store.delete_key(self._key(self.rank, self._said - 1))
        except Exception as error:  # torch raises many types; all mean: the generation is broken
            self._groups.check()
            name = self._key(self.rank)
            raise GroupBroken(f"{name}: {type(error).__name__}: {error}") from error
        return [
            torch.frombuffer(bytearray(raw), dtype=own.dtype).reshape(own.shape) for raw in said
        ]

    def _key(self, rank: int, exchange: int | None = None) -> str:
        return f"party/{self._ranks[0]}/{exchange or self._said}/{rank}"
