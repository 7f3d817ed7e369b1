"""``ray.train.report`` across generations: each step's report is delivered once, or its step is
reported again.

A round is one call of ``ray.train.report`` by every member. It opens when all of them are in the
barrier: from then on each live member owes its report, whatever becomes of the generation. It is
delivered when all have paid and its step is committed; a step that is lost before is trained, and
reported, again, and its first round is void. A round that its generation's end keeps from opening
is refused on all members; if its step stands, its metrics are delivered before the next round (its
checkpoint is not: it was not uploaded).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.events import WorkerId
from elastic_ft.hosts.ray.ray_private import (
    CheckpointManager,
    ReportCallback,
    SynchronizationBarrierResetError,
    TrainingReport,
)
from elastic_ft.hosts.ray.worker_actor import SEQUENCES, WorkerRefused

log = logging.getLogger(__name__)
REPORT = "ray.train.report"  # what Ray Train calls itself at the barrier
FENCE_CHECK_EVERY_S = 0.02


class Barrier:
    """Takes the place of Ray Train's SynchronizationActor, inside the controller.

    Args:
        is_fenced: whether a generation is over (I1).
        on_report: called as a round of reports opens, with its generation.
    """

    def __init__(self, is_fenced: Callable[[int], bool], on_report: Callable[[int], None]) -> None:
        self._is_fenced, self._on_report = is_fenced, on_report
        self._waiting: dict[int, _Gathering] = {}

    async def join(self, rank: int, world_size: int, data: Any, method: str, sequence: int) -> Any:
        """Returns rank 0's data once every rank has joined. Raises when the generation is over."""
        generation = sequence // SEQUENCES
        if self._is_fenced(generation):
            raise _refused(generation)
        gathering = self._waiting.setdefault(sequence, _Gathering())
        gathering.ranks.add(rank)
        if rank == 0:
            gathering.data = data
        if len(gathering.ranks) == world_size:
            del self._waiting[sequence]
            if method == REPORT:
                self._on_report(generation)
            gathering.complete.set()
        while not gathering.complete.is_set():
            try:
                await asyncio.wait_for(gathering.complete.wait(), FENCE_CHECK_EVERY_S)
            except TimeoutError:
                if self._is_fenced(generation) and not gathering.complete.is_set():
                    self._waiting.pop(sequence, None)
                    raise _refused(generation) from None
        return gathering.data


@dataclass
class _Gathering:
    ranks: set[int] = field(default_factory=set)
    data: Any = None
    complete: asyncio.Event = field(default_factory=asyncio.Event)


def _refused(generation: int) -> SynchronizationBarrierResetError:
    return SynchronizationBarrierResetError(f"generation {generation} is over")


@dataclass
class Round:
    """Attributes:
    members: in rank order.
    step: after which the members reported; known with the first report.
    lost: members that died before their report was fetched.
    """

    generation: int
    members: tuple[WorkerId, ...]
    lost: set[WorkerId]
    step: int = 0
    reports: dict[WorkerId, TrainingReport] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(worker in self.reports or worker in self.lost for worker in self.members)

    def in_rank_order(self) -> list[TrainingReport]:
        return [self.reports[worker] for worker in self.members if worker in self.reports]


class Rounds:
    """Collects the members' reports, and hands complete rounds on, in order.

    Args:
        callbacks: of Ray Train: checkpoint registry, validation, user callbacks.
        first: index of the last round delivered by an earlier controller.
        committed: the newest committed step.
    """

    def __init__(
        self, callbacks: Iterable[ReportCallback], first: int, committed: Callable[[], int]
    ) -> None:
        self._callbacks = list(callbacks)
        self._committed = committed
        self._rounds: dict[int, Round] = {}
        self._carried: dict[tuple[int, int], list[dict[str, Any]]] = {}  # step, generation
        self._starts: dict[int, int] = {}  # generation -> the step it started from
        self._gone: set[WorkerId] = set()
        self._delivered = first
        self.opened = first  # index of the newest round
        self.last_metrics: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what comes in

    def formed(self, generation: int, step: int) -> None:
        """A generation trains from ``step``: earlier reports of later steps are void."""
        self._starts[generation] = step

    def open(self, generation: int, members: Iterable[WorkerId]) -> None:
        self.opened += 1
        names = tuple(members)
        self._rounds[self.opened] = Round(generation, names, self._gone.intersection(names))

    def add(self, worker: WorkerId, index: int, step: int, report: TrainingReport) -> None:
        """A report, made after ``step``, is fetched from a worker: its ``index``-th."""
        pending = self._rounds.get(index)
        if pending is None or worker not in pending.members:
            log.warning("round %d: a report of %s came too late and is dropped", index, worker)
            return
        pending.reports[worker] = report
        pending.step = max(pending.step, step)
        self.deliver()

    def carry(self, refused: WorkerRefused) -> None:
        """The metrics of a refused report, from one of the workers that made it."""
        self._carried.setdefault((refused.step, refused.generation), []).append(refused.metrics)

    def lose(self, worker: WorkerId) -> None:
        """Nothing more comes from ``worker``, which may have joined a round yet to open."""
        self._gone.add(worker)
        for pending in self._rounds.values():
            if worker in pending.members and worker not in pending.reports:
                pending.lost.add(worker)
        self.deliver()

    # ----------------------------------------------------------------- what goes out

    def deliver(self) -> None:
        """Hands on what is complete and committed."""
        while (pending := self._rounds.get(self._delivered + 1)) and pending.complete:
            void = self._is_void(pending.generation, pending.step)
            if not void and pending.step > self._committed():
                return
            self._delivered += 1
            del self._rounds[self._delivered]
            self.deliver_carried(
                pending.step
            )  # they came with the reports of this round, or before
            if void or not pending.reports:
                self._count()
            else:
                self._hand_on(self._delivered, pending)

    def deliver_carried(self, before: float = math.inf) -> None:
        """Hands on what was refused of steps ``before`` that one, in their order.

        The checkpoint registry does not count it as a round.
        """
        for step, generation in sorted(self._carried):
            void = self._is_void(generation, step)
            if step >= before or (step > self._committed() and not void):
                continue
            metrics = self._carried.pop((step, generation))
            if void:
                continue
            self.last_metrics = metrics[0]
            report = TrainingReport(None, metrics[0], False)
            for callback in self._callbacks:
                if not isinstance(callback, CheckpointManager):
                    callback.after_report(training_report=report, metrics=metrics)

    def _is_void(self, generation: int, step: int) -> bool:
        """Whether a later generation started from an older state than that of ``step``."""
        return any(g > generation and start < step for g, start in self._starts.items())

    def _hand_on(self, index: int, done: Round) -> None:
        reports = done.in_rank_order()
        metrics = [report.metrics for report in reports]
        checkpoint, validation = _common_checkpoint(index, done)
        self.last_metrics = metrics[0]
        consolidated = TrainingReport(checkpoint, metrics[0], validation)
        for callback in self._callbacks:
            callback.after_report(training_report=consolidated, metrics=metrics)

    def _count(self) -> None:
        """A round of which nothing is handed on: the registry compares its count with workers'."""
        for callback in self._callbacks:
            if isinstance(callback, CheckpointManager):
                callback.after_report(TrainingReport(None, {}, False), [])


def _common_checkpoint(index: int, done: Round) -> tuple[Any, Any]:
    """The checkpoint that the members wrote together, unless one was lost writing its part.

    Where some member wrote nothing, one member writes for all, and a lost one took nothing along.
    """
    writers = [report for report in done.in_rank_order() if report.checkpoint is not None]
    if not writers:
        return None, False
    paths = {report.checkpoint.path for report in writers if report.checkpoint is not None}
    if len(paths) > 1:
        raise RuntimeError(
            f"round {index}: expected one checkpoint path from all workers, found {sorted(paths)}"
        )
    if done.lost and len(writers) == len(done.reports):
        log.warning(
            "round %d: checkpoint %s is not registered: %s was lost before reporting its part",
            index,
            min(paths),
            ", ".join(sorted(done.lost)),
        )
        return None, False
    return writers[0].checkpoint, writers[0].validation
