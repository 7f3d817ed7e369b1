"""``ray.train.report`` across generations: no round is torn, lost or delivered twice.

A round is one call of ``ray.train.report`` by every member. It opens when all of them are in the
barrier: from then on each live member owes its report, whatever becomes of the generation. If the
generation is fenced before that, all of them are refused, and none has reported: if the step
stands, its metrics are delivered before the next round (a checkpoint is not: it was not uploaded).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.events import WorkerId
from elastic_ft.ray_train.compat import (
    CheckpointManager,
    ReportCallback,
    SynchronizationBarrierResetError,
    TrainingReport,
)
from elastic_ft.ray_train.worker import SEQUENCES, Refused

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
    lost: members that died before their report was fetched.
    """

    members: tuple[WorkerId, ...]
    reports: dict[WorkerId, TrainingReport] = field(default_factory=dict)
    lost: set[WorkerId] = field(default_factory=set)

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
    """

    def __init__(self, callbacks: Iterable[ReportCallback], first: int) -> None:
        self._callbacks = list(callbacks)
        self._rounds: dict[int, Round] = {}
        self._carried: dict[int, list[dict[str, Any]]] = {}  # step -> metrics
        self._gone: set[WorkerId] = set()
        self._delivered = first
        self.opened = first  # index of the newest round
        self.last_metrics: dict[str, Any] | None = None

    def open(self, members: Iterable[WorkerId]) -> None:
        self.opened += 1
        names = tuple(members)
        self._rounds[self.opened] = Round(names, lost=self._gone.intersection(names))

    def add(self, worker: WorkerId, index: int, report: TrainingReport) -> None:
        """A report is fetched from a worker: its ``index``-th round."""
        pending = self._rounds.get(index)
        if pending is None or worker not in pending.members:
            log.warning("round %d: a report of %s came too late and is dropped", index, worker)
            return
        pending.reports[worker] = report
        self._deliver()

    def carry(self, refused: Refused) -> None:
        """The metrics of a refused report, from one of the workers that made it."""
        self._carried.setdefault(refused.step, []).append(refused.metrics)

    def deliver_carried(self) -> None:
        """Hands on what was refused; the checkpoint registry does not count it as a round."""
        for step in sorted(self._carried):
            metrics = self._carried.pop(step)
            self.last_metrics = metrics[0]
            report = TrainingReport(None, metrics[0], False)
            for callback in self._callbacks:
                if not isinstance(callback, CheckpointManager):
                    callback.after_report(training_report=report, metrics=metrics)

    def lose(self, worker: WorkerId) -> None:
        """Nothing more comes from ``worker``, which may have joined a round yet to open."""
        self._gone.add(worker)
        for pending in self._rounds.values():
            if worker in pending.members and worker not in pending.reports:
                pending.lost.add(worker)
        self._deliver()

    def _deliver(self) -> None:
        while (pending := self._rounds.get(self._delivered + 1)) and pending.complete:
            self._delivered += 1
            del self._rounds[self._delivered]
            self.deliver_carried()  # every member's came with, or before, its report of this round
            self._hand_on(self._delivered, pending)

    def _hand_on(self, index: int, done: Round) -> None:
        # With no report left, the callbacks still count the round.
        reports = done.in_rank_order() or [TrainingReport(None, {}, False)]
        metrics = [report.metrics for report in reports]
        checkpoint, validation = _common_checkpoint(index, done)
        if done.reports:
            self.last_metrics = metrics[0]
        consolidated = TrainingReport(checkpoint, metrics[0], validation)
        for callback in self._callbacks:
            callback.after_report(training_report=consolidated, metrics=metrics)


def _common_checkpoint(index: int, done: Round) -> tuple[Any, Any]:
    """The checkpoint that the members wrote together, unless one was lost writing its part.

    Where some member wrote nothing, one member writes for all, and a lost one took nothing along.
    """
    writers = [report for report in done.in_rank_order() if report.checkpoint is not None]
    if not writers:
        return None, False
    paths = {report.checkpoint.path for report in writers}
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
