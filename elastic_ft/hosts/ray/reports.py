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
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.assignment import WorkerId
from elastic_ft.hosts.ray import ray_private
from elastic_ft.hosts.ray.train_calls import REPORT, SEQUENCES, WorkerRefused
from elastic_ft.hosts.ray.worker_actor import Polled, WorkerLook

log = logging.getLogger(__name__)
FENCE_CHECK_EVERY_S = 0.02
AHEAD_MAX = 8  # rounds that wait for a user's callbacks, before training waits for them
QUICK_S = 0.05  # a callback that takes longer holds up nothing
SLOW_S, LAST_S = 30.0, 600.0  # one that does is told of; and is left behind, as its job ends


class Barrier:
    """Takes the place of Ray Train's SynchronizationActor, inside the controller.

    Args:
        is_fenced: whether a generation is over (I1).
        on_report: called as a round of reports opens, with its generation.
    """

    def __init__(self, is_fenced: Callable[[int], bool], on_report: Callable[[int], None]) -> None:
        self._is_fenced, self._on_report = is_fenced, on_report
        self._waiting: dict[int, _Gathering] = {}
        self._passed: tuple[int, Any] = (0, None)

    def resume(self, passed: Iterable[tuple[int, Any]]) -> None:
        """Goes on where an earlier controller's was. ``passed``: as some of the ranks have been
        told; the others ask again."""
        self._passed = max(passed, key=lambda one: one[0], default=(0, None))

    async def join(self, rank: int, world_size: int, data: Any, method: str, sequence: int) -> Any:
        """Returns rank 0's data once every rank has joined. Raises when the generation is over."""
        generation = sequence // SEQUENCES
        if sequence == self._passed[0]:  # others have passed: refused, it would be torn
            return self._passed[1]
        if self._is_fenced(generation):
            raise _refused(generation)
        gathering = self._waiting.setdefault(sequence, _Gathering())
        gathering.ranks.add(rank)
        if rank == 0:
            gathering.data = data
        if len(gathering.ranks) == world_size:
            del self._waiting[sequence]
            self._passed = (sequence, gathering.data)  # for who does not hear of it, and asks again
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


def _refused(generation: int) -> ray_private.SynchronizationBarrierResetError:
    return ray_private.SynchronizationBarrierResetError(f"generation {generation} is over")


class UsersCallbacks:
    """A user's callbacks, called in turn in a thread of their own: while one takes its time, as an
    upload does, Ray Train's loop goes on, in which workers meet to report.

    What is quick is waited for. So is, by training, what has AHEAD_MAX rounds behind it: as with
    Ray Train itself, nobody reports faster than callbacks take it.
    """

    def __init__(self, callbacks: list[ray_private.ReportCallback]) -> None:
        self._callbacks = callbacks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="callbacks")
        self._calls: list[Future[None]] = []
        self._since_s, self._is_told = 0.0, False

    def call(self, report: ray_private.TrainingReport, metrics: list[dict[str, Any]]) -> None:
        """Returns at once, or soon."""
        if not self._callbacks:
            return
        self._since_s, self._is_told = time.monotonic(), False
        self._calls.append(self._thread.submit(self._call, report, metrics))
        futures.wait(self._calls, QUICK_S)

    def _call(self, report: ray_private.TrainingReport, metrics: list[dict[str, Any]]) -> None:
        for callback in self._callbacks:
            callback.after_report(training_report=report, metrics=metrics)

    @property
    def take_s(self) -> float:
        """Since the last call."""
        return time.monotonic() - self._since_s

    @property
    def are_busy(self) -> bool:
        """Raises what one of them has raised, each time: not all who ask can tell of it."""
        while self._calls and self._calls[0].done():
            self._calls[0].result()
            del self._calls[0]
        if self._calls and not self._is_told and self.take_s > SLOW_S:
            self._is_told = True
            log.warning(
                "a callback's after_report has run for more than %g s: training goes on, and waits "
                "for it once %d reports do",
                SLOW_S,
                AHEAD_MAX,
            )
        return bool(self._calls)


@dataclass
class Round:
    """Attributes:
    step: after which the members reported; known with the first report.
    reports: with the rank of each.
    lost: members that died before their report was fetched.
    """

    generation: int
    members: tuple[WorkerId, ...]
    lost: set[WorkerId]
    step: int = 0
    reports: dict[WorkerId, tuple[int, ray_private.TrainingReport]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(worker in self.reports or worker in self.lost for worker in self.members)

    def in_rank_order(self) -> list[ray_private.TrainingReport]:
        made = sorted(self.reports.values(), key=lambda one: one[0])
        return [report for _, report in made]


class Rounds:
    """Collects the members' reports, and hands complete rounds on, in order.

    Args:
        callbacks: of Ray Train: checkpoint registry, validation, user callbacks.
        first: index of the last round delivered by an earlier controller.
        committed: the newest committed step.
        on_delivered: called with the index of each round that is.

    Attributes:
        opened: index of the newest round.
        delivered: of the last one that needs no telling any more.
    """

    def __init__(
        self,
        callbacks: Iterable[ray_private.ReportCallback],
        first: int,
        committed: Callable[[], int],
        on_delivered: Callable[[int], None] = lambda index: None,
    ) -> None:
        own = [
            callback
            for callback in callbacks
            if isinstance(callback, ray_private.UserCallbackHandler)
        ]
        self._callbacks = [callback for callback in callbacks if callback not in own]
        self._users = UsersCallbacks(own)
        self._is_handing = False  # the round behind ``delivered``
        self.is_ending = False  # nobody trains any more
        self._committed, self._on_delivered = committed, on_delivered
        self._rounds: dict[int, Round] = {}
        # (step, generation) -> rank -> metrics
        self._carried: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self._starts: dict[int, int] = {}  # generation -> the step it started from
        self._gone: set[WorkerId] = set()
        self.delivered = self.opened = first
        self.last_metrics: dict[str, Any] | None = None

    @property
    def is_full(self) -> bool:
        """No more is to be fetched until a user's callbacks have had what there is. What waits for
        its step to be committed may be more: that takes a snapshot, which takes further steps."""
        return self._is_handing and len(self._rounds) > AHEAD_MAX and not self.is_ending

    async def finish(self) -> None:
        """Hands on what is left, and waits for a user's callbacks, as long as they return."""
        self.deliver()
        while self._is_handing and self._users.take_s < LAST_S:
            await asyncio.sleep(FENCE_CHECK_EVERY_S)
            self.deliver()
        self.deliver_carried()
        while self._users.are_busy and self._users.take_s < LAST_S:
            await asyncio.sleep(FENCE_CHECK_EVERY_S)
        if self._users.are_busy:
            log.error("a callback's after_report has not returned for %g s: left behind", LAST_S)

    @property
    def is_awaiting(self) -> bool:
        """Something has been, or is to be, reported that was not handed on."""
        return bool(self._rounds or self._carried)

    # ------------------------------------------------------------------ what comes in

    def formed(self, generation: int, step: int) -> None:
        """A generation trains from ``step``: earlier reports of later steps are void."""
        self._starts[generation] = step

    def resume(self, told: Mapping[WorkerId, WorkerLook], delivered: int) -> None:
        """Goes on where an earlier controller's were: who has joined in a round that was not
        delivered has kept its report, or still owes it; so does who has not heard that the last
        one has opened, and asks again.

        ``delivered``: index of the last round that was, as far as that is known otherwise.
        """
        last = max(told.values(), key=lambda one: one.passed[0])
        unheard = {
            worker
            for worker, one in told.items()
            if one.rounds < last.rounds
            and one.joined < last.rounds  # who came later owes it nothing
            and one.generation == last.passed[0] // SEQUENCES
        }
        self.delivered = max(self.delivered, delivered, *(one.delivered for one in told.values()))
        self.opened = self.delivered
        for index in range(self.opened + 1, max(one.rounds for one in told.values()) + 1):
            members = {w for w, one in told.items() if one.joined < index <= one.rounds}
            if index == last.rounds:
                members |= unheard
            reports = {
                answer.report_generation
                for one in told.values()
                for answer in one.undelivered
                if answer.report_index == index
            }
            newest = max(one.generation for one in told.values())
            self.open(min(reports, default=newest), members)
        for worker, one in told.items():
            for answer in one.undelivered:
                self.take(worker, answer)

    def open(self, generation: int, members: Iterable[WorkerId]) -> None:
        self.opened += 1
        names = tuple(members)
        self._rounds[self.opened] = Round(generation, names, self._gone.intersection(names))

    def take(self, worker: WorkerId, answer: Polled) -> None:
        for refused in answer.carried:
            self._carry(refused)
        if answer.training_report is not None:
            self._add(worker, answer.training_report, answer)

    def _add(self, worker: WorkerId, report: ray_private.TrainingReport, answer: Polled) -> None:
        index = answer.report_index
        pending = self._rounds.get(index)
        if index <= self.delivered:
            return  # told again, to another controller
        if pending is None or worker not in pending.members:
            log.warning("round %d: a report of %s came too late and is dropped", index, worker)
            return
        pending.reports[worker] = (answer.report_rank, report)
        # A controller that found nobody's report could not know it.
        pending.generation = min(pending.generation, answer.report_generation)
        pending.step = max(pending.step, answer.report_step)
        self.deliver()

    def _carry(self, refused: WorkerRefused) -> None:
        if refused.after >= self.delivered:  # else it was told again, to another controller
            made = self._carried.setdefault((refused.step, refused.generation), {})
            made[refused.rank] = refused.metrics

    def lose(self, worker: WorkerId) -> None:
        """Nothing more comes from ``worker``, which may have joined a round yet to open."""
        self._gone.add(worker)
        for pending in self._rounds.values():
            if worker in pending.members and worker not in pending.reports:
                pending.lost.add(worker)
        self.deliver()

    # ----------------------------------------------------------------- what goes out

    def deliver(self) -> None:
        """Hands on what is complete and committed: each once a user's callbacks have had the one
        before. Raises what they raise."""
        while not self._users.are_busy:
            if self._is_handing:
                self._is_handing = False
                self.delivered += 1
                del self._rounds[self.delivered]
                self._on_delivered(self.delivered)
            pending = self._rounds.get(self.delivered + 1)
            if pending is None or not pending.complete:
                return
            void = self._is_void(pending.generation, pending.step)
            if not void and pending.step > self._committed():
                return
            self._is_handing = True
            self.deliver_carried(
                pending.step
            )  # they came with the reports of this round, or before
            if void or not pending.reports:
                self._count()
            else:
                self._hand_on(self.delivered + 1, pending)

    def deliver_carried(self, before: float = math.inf) -> None:
        """Hands on what was refused of steps ``before`` that one, in their order.

        The checkpoint registry does not count it as a round.
        """
        for step, generation in sorted(self._carried):
            void = self._is_void(generation, step)
            if step >= before or (step > self._committed() and not void):
                continue
            made = self._carried.pop((step, generation))
            if void:
                continue
            metrics = [made[rank] for rank in sorted(made)]
            self.last_metrics = metrics[0]
            report = ray_private.TrainingReport(None, metrics[0], False)
            for callback in self._callbacks:
                if not isinstance(callback, ray_private.CheckpointManager):
                    callback.after_report(training_report=report, metrics=metrics)
            self._users.call(report, metrics)

    def _is_void(self, generation: int, step: int) -> bool:
        """Whether a later generation started from an older state than that of ``step``."""
        return any(g > generation and start < step for g, start in self._starts.items())

    def _hand_on(self, index: int, done: Round) -> None:
        reports = done.in_rank_order()
        metrics = [report.metrics for report in reports]
        checkpoint, validation = _common_checkpoint(index, done)
        self.last_metrics = metrics[0]
        consolidated = ray_private.TrainingReport(checkpoint, metrics[0], validation)
        for callback in self._callbacks:
            callback.after_report(training_report=consolidated, metrics=metrics)
        self._users.call(consolidated, metrics)

    def _count(self) -> None:
        """A round of which nothing is handed on: the registry compares its count with workers'."""
        for callback in self._callbacks:
            if isinstance(callback, ray_private.CheckpointManager):
                callback.after_report(ray_private.TrainingReport(None, {}, False), [])


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
