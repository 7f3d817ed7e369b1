"""What ``ray.train`` calls in a train loop come to: collectives that outlive their controller,
reports that outlive their generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.train import Checkpoint

from elastic_ft.hosts.ray.ray_private import (
    DistributedTrainFnUtils,
    SynchronizationBarrierResetError,
    get_train_context,
)

log = logging.getLogger(__name__)
SEQUENCES = 1_000_000_000  # collective calls per generation: the sequence number tells which it is
REPORT = "ray.train.report"  # what Ray Train calls itself at the barrier
LOOK_S = 1.0  # who waits for others looks so often whether this worker is cut off
AWAY_S, AWAY_AGAIN_S = 60.0, 0.2  # a collective of ray.train waits so long for a controller

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """A report of ``step`` that its generation's barrier has refused.

    Attributes:
        generation, rank: in which it was made, and its maker's there.
        after: index of the round before it: it is delivered before the next one.
    """

    step: int
    metrics: dict[str, Any]
    generation: int
    rank: int
    after: int


@dataclass(frozen=True, slots=True)
class ReportMade:
    """After which step a worker made a report, in which generation, and its rank there."""

    step: int = 0
    generation: int = 0
    rank: int = 0


@dataclass
class MadeReports:
    """Attributes:
    reports: by the index of their rounds.
    refused: reports of this generation that its barrier has refused.
    """

    reports: dict[int, ReportMade] = field(default_factory=dict)
    refused: list[WorkerRefused] = field(default_factory=list)


class ElasticTrainFnUtils(DistributedTrainFnUtils):
    """What ``ray.train.*`` calls in a train loop. Nothing here raises as a generation breaks."""

    def __init__(self, made: MadeReports) -> None:
        self._made = made

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As Ray Train's. Refused with its generation, the metrics are delivered with the next."""
        context = get_train_context()
        before, rank = context.report_call_index, context.distributed_context.world_rank
        made = ReportMade(last_given_step(), context.collective_seq // SEQUENCES, rank)
        self._made.reports[before + 1] = made
        super().report(metrics, checkpoint, *args, **kwargs)
        if context.report_call_index == before:
            refused = WorkerRefused(made.step, metrics, made.generation, made.rank, after=before)
            self._made.refused.append(refused)

    def barrier(self) -> None:
        or_alone(None, super().barrier)

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return or_alone(data, super().broadcast_from_rank_zero, data)

    def get_preemption_info(self) -> Any:
        own = get_train_context().preemption_context.preemption_info
        return or_alone(own, super().get_preemption_info)


def or_alone(own: T, collective: Callable[..., T], *args: Any) -> T:
    """Returns what ``collective`` does, or ``own`` if the generation is over.

    An error would end the train loop, and with it this survivor. As it is, the running iteration
    is the loop's last in this generation: what it makes of its own value reaches no other worker.
    """
    try:
        return collective(*args)
    except RayTaskError as error:
        if isinstance(error.cause, SynchronizationBarrierResetError):
            log.warning("a collective of ray.train is broken off: %s", error.cause)
            return own
        raise


def last_given_step() -> int:
    """The step that this worker's train loop was last given."""
    from elastic_ft.worker import this_process

    return this_process.current_step()


def is_cut_off() -> bool:
    """Whether this worker can reach no controller."""
    from elastic_ft.worker import this_process

    worker = this_process.current_worker()
    return worker is not None and worker.cut_off


@dataclass(frozen=True, slots=True)
class Passed:
    """The last collective that a worker has passed: its number, and what it returned.

    Attributes:
        rounds: index of the last round of reports up to it.
    """

    sequence: int = 0
    data: Any = None
    rounds: int = 0


class Meeting:
    """Ray Train's synchronization actor, as its workers see it: it may be away for a while."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor
        self.passed = Passed()
        # Of an actor's first call its address is asked of the GCS, which may be away by the first
        # report: the worker would wait there for good.
        self._found = actor.process.remote()

    @property
    def broadcast_from_rank_zero(self) -> Meeting:
        return self

    def remote(self, **call: Any) -> ray.ObjectRef:
        """Returns once it is there. Raises RayTaskError of a generation that is over."""
        until_s = time.monotonic() + AWAY_S
        while True:
            answer = self._actor.broadcast_from_rank_zero.remote(**call)
            try:
                data, is_round = _got(answer), call["caller_method_name"] == REPORT
                index = get_train_context().report_call_index if is_round else self.passed.rounds
                self.passed = Passed(call["collective_seq"], data, index)
                return answer
            except RayActorError as error:
                if time.monotonic() > until_s:
                    why = SynchronizationBarrierResetError(f"no controller for {AWAY_S:g} s")
                    raise RayTaskError("broadcast_from_rank_zero", str(error), why) from error
                log.info("a collective of ray.train waits for the controller: %s", error)
                time.sleep(AWAY_AGAIN_S)


def _got(answer: ray.ObjectRef) -> Any:
    """As ``ray.get``, but for a worker that is cut off, whose answer never comes: RayTaskError."""
    while True:
        try:
            return ray.get(answer, timeout=LOOK_S)
        except GetTimeoutError as error:
            if is_cut_off():
                why = SynchronizationBarrierResetError("this worker is cut off")
                raise RayTaskError("broadcast_from_rank_zero", str(why), why) from error
