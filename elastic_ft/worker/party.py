"""Who runs together what comes between two steps: mostly all members of a generation.

A generation may begin with some in the middle of an evaluation or an export that broke, and with
others who know nothing of it: they came in for the lost, have it behind them, or are in a step that
is made again (``worker.whereabouts``). Those do not wait for them in the default group's
collectives, where one's gradients would meet another's losses: each party has its own, over the
store, until all meet at their next step.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from elastic_ft.errors import GroupBroken, UsageError
from elastic_ft.groups.groups import Groups
from elastic_ft.worker.agreement import sum_over_members

log = logging.getLogger(__name__)
POLL_S = 0.05
LEFT = "party/left"  # whose loop is over, after which step
ALONE = "party/alone"  # who leads needs a world of its own


class Party:
    """Args:
        places: of all members, see ``worker.whereabouts``; none: all are at one.

    Attributes:
        rank, world_size: of this member, in it.
        is_whole: all members are in it.
    """

    def __init__(self, groups: Groups, places: Sequence[float] = ()) -> None:
        assert groups.rank is not None
        self._groups, self._said = groups, 0
        everyone = range(groups.world_size)
        at = list(places) or [0.0 for _ in everyone]
        own = at[groups.rank]
        self._ranks = [rank for rank in everyone if at[rank] == own]
        self.rank, self.world_size = self._ranks.index(groups.rank), len(self._ranks)
        self.is_whole = self.world_size == groups.world_size
        self._leads, self._leading = own == max(at), at.count(max(at))

    def need_whole(self, members_min: int, step_aside: Callable[[], NoReturn]) -> None:
        """Of a model that is cut, all members have to be there: who is behind steps aside, and the
        others wait for the generation that forms without it.

        Raises GroupBroken then, and UsageError where less than ``members_min`` would be left.
        """
        if self.is_whole:
            return
        if self._leading < members_min:
            raise UsageError(
                "a worker was lost between two steps, and who came in for it can't take part in "
                "the evaluation or export that is made again, as the model is cut: set "
                "elastic.min_workers below max_workers, or parallel.strategy: ddp"
            )
        if not self._leads:
            step_aside()
        self._tell(ALONE)
        while True:
            self._look()

    def meet(self, step_aside: Callable[[], NoReturn]) -> None:
        """Waits until all members have come to their step, however long what the others do before
        it takes: a hang is the controller's to see. Raises GroupBroken."""
        if self.is_whole:
            return
        self._tell(f"party/met/{self._groups.rank}")
        met = [f"party/met/{rank}" for rank in range(self._groups.world_size)]
        while not self._is_told(met):
            if not self._leads and self._is_told([ALONE]):
                step_aside()
            if self._is_told([LEFT]):
                raise GroupBroken("a member has left its loop, and makes no step any more")
            self._look()

    def leave(self, step: int) -> None:
        """This member's loop is over after ``step``: waits until those of all members are, before
        what they do together then. Raises GroupBroken, as where one makes another step instead,
        which breaks the generation off (``worker.parting``). Where the store has gone with its
        controller, it is gone for all: nobody waits."""
        everyone = range(self._groups.world_size)
        left = [f"{LEFT}/{rank}" for rank in everyone]
        try:
            self._tell(LEFT, f"rank {self._groups.rank} has left its loop after step {step}")
            self._tell(left[self._groups.rank or 0])
            while not self._is_told(left):
                self._look()
        except GroupBroken as error:
            self._groups.check()
            log.info("nobody knows whose loops are over: %s", error)

    def _look(self) -> None:
        time.sleep(POLL_S)
        self._groups.check()

    def _tell(self, key: str, what: str = "") -> None:
        with self._broken_as(key) as store:
            store.set(key, what)

    def _is_told(self, keys: list[str]) -> bool:
        with self._broken_as(keys[0]) as store:
            return bool(store.check(keys))

    @contextlib.contextmanager
    def _broken_as(self, name: str) -> Iterator[dist.Store]:
        """What the store can't do means that the generation is broken. Raises GroupBroken."""
        store = self._groups.store
        assert store is not None
        try:
            yield store
        except Exception as error:  # torch raises many types
            self._groups.check()
            raise GroupBroken(f"{name}: {type(error).__name__}: {error}") from error

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value's sum, in float64, the same on each member."""
        own = list(map(float, values))
        if self.is_whole:
            return sum_over_members(own, self.world_size)
        gathered = self._exchanged(torch.tensor(own, dtype=torch.float64, device="cpu"))
        return [float(value) for value in torch.stack(gathered).sum(0)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each member's, of one shape."""
        if not self.is_whole:
            return [found.to(tensor.device) for found in self._exchanged(tensor)]
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.contiguous())
        if tensor.is_cuda:  # NCCL raises nothing: of what was aborted these may be any numbers
            torch.cuda.current_stream(tensor.device).synchronize()
        self._groups.check()
        return found

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Over the store, whatever the others do. Raises GroupBroken.

        Each member deletes its word of the exchange before: who has answered this one has read it.
        """
        if tensor.numel() == 0:
            return [tensor.detach().cpu()] * self.world_size
        self._said += 1
        own = tensor.detach().cpu().contiguous()
        timeout = datetime.timedelta(seconds=self._groups.operation_timeout_s)
        with self._broken_as(self._key(self.rank)) as store:
            store.set(self._key(self.rank), own.reshape(-1).view(torch.uint8).numpy().tobytes())
            keys = [self._key(rank) for rank in range(self.world_size)]
            store.wait(keys, timeout)
            said = [store.get(key) for key in keys]
            if self._said > 1:
                store.delete_key(self._key(self.rank, self._said - 1))
        return [
            torch.frombuffer(bytearray(raw), dtype=own.dtype).reshape(own.shape) for raw in said
        ]

    def _key(self, rank: int, exchange: int | None = None) -> str:
        return f"party/{self._ranks[0]}/{exchange or self._said}/{rank}"
