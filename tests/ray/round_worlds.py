"""Rounds of two workers, and a barrier that is fenced by hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from elastic_ft.hosts.ray.ray_private import TrainingReport
from elastic_ft.hosts.ray.reports import REPORT, Barrier, Rounds
from elastic_ft.hosts.ray.train_calls import SEQUENCES, WorkerRefused
from elastic_ft.hosts.ray.worker_actor import Polled


class Callback:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, list[Any]]] = []

    def after_report(self, training_report: Any, metrics: list[Any]) -> None:
        checkpoint = training_report.checkpoint
        self.seen.append((checkpoint.path if checkpoint else None, metrics))


def report(metrics: Any, path: str | None = None) -> TrainingReport:
    checkpoint: Any = SimpleNamespace(path=path) if path else None
    return TrainingReport(checkpoint, metrics, False)


class World:
    """Two workers, a and b, of ranks 0 and 1; what is committed is set by hand."""

    def __init__(self, callback: Callback) -> None:
        self.committed = 100
        self.generations: dict[int, int] = {}  # of the rounds
        self.rounds = Rounds([callback], 0, lambda: self.committed)  # type: ignore[list-item]

    def open(self, *members: str, generation: int = 1) -> None:
        self.rounds.open(generation, members or ("a", "b"))
        self.generations[self.rounds.opened] = generation

    def add(
        self, worker: str, index: int, metrics: Any, path: str | None = None, step: int = 0
    ) -> None:
        """The report of round ``index``, made after step ``index`` or ``step``."""
        told = reported(worker, index, metrics, path, step)
        told.report_generation = self.generations.get(index, 1)
        self.rounds.take(worker, told)

    def carry(self, worker: str, step: int, metrics: Any, after: int = 0) -> None:
        """A report of generation 1 that was refused after round ``after``."""
        self.rounds.take(worker, carried(worker, step, metrics, after))


def rank(worker: str) -> int:
    return "abc".index(worker)


def reported(
    worker: str, index: int, metrics: Any, path: str | None = None, step: int = 0
) -> Polled:
    return Polled(
        running=True,
        training_report=report(metrics, path),
        report_index=index,
        report_step=step or index,
        report_generation=1,
        report_rank=rank(worker),
    )


def carried(worker: str, step: int, metrics: Any, after: int = 0) -> Polled:
    refused = WorkerRefused(step, metrics, 1, rank(worker), after)
    return Polled(running=True, report_index=after, carried=(refused,))


@dataclass
class Look:
    """What a worker says to the next controller, in generation 1."""

    rounds: int
    undelivered: tuple[Polled, ...] = ()
    delivered: int = 0
    joined: int = 0
    generation: int = 1

    @property
    def passed(self) -> tuple[int, Any]:
        return SEQUENCES + self.rounds, f"of round {self.rounds}"


class Fenced:
    def __init__(self) -> None:
        self.fenced: set[int] = set()
        self.opened: list[int] = []
        self.barrier = Barrier(self.fenced.__contains__, self.opened.append)

    async def join(self, rank: int, size: int, generation: int, data: Any = None) -> Any:
        sequence = generation * SEQUENCES + 1
        return await self.barrier.join(rank, size, data, REPORT, sequence)
