"""Ranks that share positions as threads of this process: what each is told is what all bring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.ulysses import HeadShare

DEADLINE_S = 60.0


@dataclass
class Meeting:
    """Of as many threads as there are ranks; each has what all have brought."""

    size: int
    brought: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=DEADLINE_S)

    def all_of(self, rank: int, own: Tensor) -> list[Tensor]:
        self.brought[rank] = own
        self._barrier.wait()
        found = [self.brought[rank] for rank in range(self.size)]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True)
class Seat:
    meeting: Meeting
    rank: int


class Threads(ContextShare):
    group: Seat  # type: ignore[assignment]

    @property
    def ranks(self) -> int:
        return self.group.meeting.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def whole(self, counts: Tensor) -> Tensor:
        return torch.stack(self.group.meeting.all_of(self.rank, counts.detach())).sum(dim=0)


class ThreadsByHeads(Threads, HeadShare):
    def swap(self, parts_R: Tensor) -> Tensor:
        return _Swap.apply(parts_R, self.group)


class _Swap(torch.autograd.Function):
    """Gradients go the way back, which is the same."""

    @staticmethod
    def forward(ctx: Any, parts_R: Tensor, seat: Seat) -> Tensor:
        ctx.seat = seat
        everyones = seat.meeting.all_of(seat.rank, parts_R.detach())
        return torch.stack([parts[seat.rank] for parts in everyones])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Swap.forward(ctx, gradient, ctx.seat), None


HOW: dict[str, type[Threads]] = {"all_gather": Threads, "ulysses": ThreadsByHeads}


def on_ranks(
    count: int, work: Callable[[ContextShare], Any], method: str = "all_gather"
) -> list[Any]:
    """What ``work`` returns on each rank, by rank."""
    meeting = Meeting(count)

    def run(rank: int) -> Any:
        try:
            return work(HOW[method](Seat(meeting, rank)))  # type: ignore[arg-type]
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [made.result(DEADLINE_S) for made in [pool.submit(run, r) for r in range(count)]]
