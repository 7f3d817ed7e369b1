"""The worker's side: a Ray Train worker actor whose training thread takes part in the job.

The actor's own threads answer polls and hold the sentinel call. What the training thread sees of
Ray Train (rank, world size, report barrier) changes only at its safe point, in ``take_seat``.
"""

from __future__ import annotations

from elastic_ft.worker import birth  # noqa: F401 isort: skip  # it tells when this began

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import psutil
import ray
from ray.exceptions import RayTaskError
from ray.train import Checkpoint

from elastic_ft.core.events import Member, NodeId, WorkerId
from elastic_ft.core.typed import decoder
from elastic_ft.hosts.ray.ray_private import (
    DistributedContext,
    DistributedTrainFnUtils,
    PreemptionContext,
    RayTrainWorker,
    SynchronizationBarrierResetError,
    WorkerStatus,
    get_train_context,
    set_train_fn_utils,
)
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.devices import one_gpu

log = logging.getLogger(__name__)
SEQUENCES = 1_000_000_000  # collective calls per generation: the sequence number tells which it is
END = "end"  # the concurrency group of the sentinel
FLUSH_S = 10.0  # for the controller to fetch the last report

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """A member's place in one generation."""

    generation: int
    step: int  # the generation starts from the state after this step
    place: DistributedContext
    reports: int  # rounds of ray.train.report so far, for one who was not there


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is started with. ``train_loop`` travels by value: its node may be gone."""

    address: tuple[str, int]
    key: JobKey
    worker: WorkerId
    node: NodeId
    train_loop: Callable[[], Any] | None
    domain_label: str | None = None  # of the nodes: what fails together


class ByValue(Generic[T]):
    """Stands in for Ray Train's reference to the train function."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """A report of ``step`` that its generation's barrier has refused.

    ``generation``: the next one, in which the step stands.
    """

    step: int
    metrics: dict[str, Any]
    generation: int = 0


@dataclass
class Polled(WorkerStatus):
    """Ray Train's worker status, and what elastic_ft adds.

    Attributes:
        sequence: of the answer: one that was lost on its way is given again.
        report_index: of the round that the report in it belongs to.
        report_step: the step after which it was made.
        carried: refused reports of steps that stand: they come before that report.
    """

    sequence: int = 0
    report_index: int = 0
    report_step: int = 0
    carried: tuple[WorkerRefused, ...] = ()


class ElasticWorker(RayTrainWorker):
    """The actor of one worker: one process, one life, in as many generations as it lives to see.

    Threads: the actor's own answer Ray Train's calls (``init_train_context``, ``start_training``,
    ``poll_status``), one after the other, and must not block: a report is fetched or not there.
    One more, of concurrency group END, holds the sentinel ``await_end`` to the last. The training
    thread runs ``worker.run_worker`` and in it the user's train loop; it alone calls ``take_seat``,
    at its safe point, so that what ``ray.train`` tells the user of rank and world changes between
    two steps. What it reports lies in Ray Train's queue, of one place, until it is polled.

    The process ends with the actor: killed by the host, with its node, or when it is retired after
    its last report was fetched.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._end = ""
        self._seated = False
        self._reports = 0
        self._made = MadeReports()
        self._carried: deque[WorkerRefused] = deque()
        self._answer = Polled(running=True)
        # It takes seconds: Ray Train's calls, that come before the training thread, need not wait.
        threading.Thread(target=_import_worker, name="import", daemon=True).start()

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        super().init_train_context(*args, **kwargs)
        set_train_fn_utils(ElasticTrainFnUtils(self._made))

    def start_training(self, task: Task) -> None:
        """Starts the training thread and returns."""
        self.run_train_fn(ByValue(functools.partial(self._train, task)))

    @ray.method(concurrency_group=END)
    def await_end(self) -> str:
        """Blocks until the training thread has ended. Returns its error, or "".

        The call is the sentinel: it fails as soon as Ray knows that the process is gone.
        """
        self._ended.wait()
        queue = get_train_context().execution_context.result_queue
        deadline_s = time.monotonic() + FLUSH_S
        while not queue.empty() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self._end

    def poll_status(self, received: int = 0) -> Polled:
        """Fetches at most one report. ``received``: sequence number of the last answer seen."""
        if self._answer.sequence > received:
            return self._answer
        status, step = super().poll_status(), 0
        if status.training_report is not None:
            self._reports += 1
            step = self._made.steps.pop(self._reports, 0)
        carried = tuple(self._carried.popleft() for _ in range(len(self._carried)))
        self._answer = Polled(
            **vars(status),
            sequence=received + 1,
            report_index=self._reports,
            report_step=step,
            carried=carried,
        )
        return self._answer

    def take_seat(self, seat: WorkerSeat) -> None:
        """In the training thread, at its safe point: Ray Train's context of the new generation."""
        context = get_train_context()
        context.distributed_context = seat.place
        context.collective_seq = seat.generation * SEQUENCES
        context.preemption_context = PreemptionContext()
        if not self._seated:
            self._seated = True
            context.report_call_index = context.current_report_index = seat.reports
            self._reports = seat.reports
        for refused in self._made.refused:
            if refused.step <= seat.step:  # the others' steps are trained, and reported, again
                self._carried.append(replace(refused, generation=seat.generation))
        self._made.refused.clear()
        os.environ.update(
            RANK=str(seat.place.world_rank),
            WORLD_SIZE=str(seat.place.world_size),
            LOCAL_RANK=str(seat.place.local_rank),
            LOCAL_WORLD_SIZE=str(seat.place.local_world_size),
            NODE_RANK=str(seat.place.node_rank),
        )

    def _train(self, task: Task) -> Any:
        from elastic_ft.worker.worker import run_worker

        os.environ.update(_own_gpu(task.worker))
        returned: list[Any] = []

        def train_loop() -> None:
            assert task.train_loop is not None
            returned.append(task.train_loop())

        try:
            run_worker(
                task.address,
                task.key,
                _member_here(task),
                train_loop=train_loop if task.train_loop is not None else None,
                on_generation=lambda extra: self.take_seat(decoder(WorkerSeat)(extra)),
            )
        except BaseException as error:
            self._end = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._ended.set()
        return returned[0] if returned else None


def _import_worker() -> None:
    from elastic_ft.worker import worker  # noqa: F401


def _own_gpu(worker: WorkerId) -> dict[str, str]:
    """The environment that shows this process its GPU alone, whatever Ray Train has set since."""
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1)
    return one_gpu(worker, gpus, in_use=gpus if share < 1 else ())


def _member_here(task: Task) -> Member:
    labels = ray.get_runtime_context().get_node_labels()
    domain = str(labels.get(task.domain_label, "")) if task.domain_label else ""
    host = os.uname().nodename
    return Member(task.worker, task.node, host, os.getpid(), find_raylet_pid(), domain)


@dataclass
class MadeReports:
    """Attributes:
    steps: round -> step after which this worker made its report.
    refused: reports of this generation that its barrier has refused.
    """

    steps: dict[int, int] = field(default_factory=dict)
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
        before, step = context.report_call_index, current_step()
        self._made.steps[before + 1] = step
        super().report(metrics, checkpoint, *args, **kwargs)
        if context.report_call_index == before:
            self._made.refused.append(WorkerRefused(step, metrics))

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


def current_step() -> int:
    """The step that this worker's train loop was last given."""
    from elastic_ft.worker import worker

    return worker.current_step()


def find_raylet_pid() -> int | None:
    """Of the node that this worker belongs to: what must die for the whole node to be lost."""
    for parent in psutil.Process().parents():
        if parent.name() == "raylet":
            return int(parent.pid)
    return None
