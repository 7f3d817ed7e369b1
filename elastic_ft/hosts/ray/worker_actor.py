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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    remove_placement_group,
)

from elastic_ft.core.assignment import Member, NodeId, WorkerId
from elastic_ft.core.typed import decoder
from elastic_ft.hosts.ray import ray_private, train_calls
from elastic_ft.hosts.ray.names import actor_named, run_of
from elastic_ft.hosts.ray.submission import ByValue
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.devices import one_gpu
from elastic_ft.worker.forked import uncollected

log = logging.getLogger(__name__)
END = "end"  # the concurrency group of the sentinel
END_CALLS = 8  # at once: those of controllers that are gone wait on
FLUSH_S = 10.0  # for the controller to fetch the last report
# What a seat sets, as of a world of one.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"NODE_RANK": "0"}
UNASKED_S, LOOKS = 30.0, 6  # after its end a worker unpolled for so long may free its place


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """A member's place in one generation."""

    generation: int
    step: int  # the generation starts from the state after this step
    place: ray_private.DistributedContext
    reports: int  # rounds of ray.train.report so far, for one who was not there


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is started with. ``train_loop`` travels by value, as its node may be gone; and
    pickled, as reading it imports what it names, beside the thread that imports early."""

    address: tuple[str, int]
    key: JobKey
    worker: WorkerId
    node: NodeId
    train_loop: bytes | None
    domain_labels: tuple[str, ...] = ()  # of the nodes: what fails together, outermost first


@dataclass
class Polled(ray_private.WorkerStatus):
    """Ray Train's worker status, and what elastic_ft adds.

    Attributes:
        sequence: of the answer: one that was lost on its way is given again.
        report_index: of the round that the report in it belongs to.
        report_step: the step after which it was made.
        report_generation: in which it was made.
        report_rank: of its maker, there.
        carried: refused reports of steps that stand.
    """

    sequence: int = 0
    report_index: int = 0
    report_step: int = 0
    report_generation: int = 0
    report_rank: int = 0
    carried: tuple[train_calls.WorkerRefused, ...] = ()

    def is_settled(self, delivered: int) -> bool:
        """Whether all that is in it came to its end with the round ``delivered``."""
        told = self.training_report is None or self.report_index <= delivered
        return told and all(refused.after < delivered for refused in self.carried)


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """What a worker says to a controller that did not start it.

    Attributes:
        metadata: Ray Train's, of the process.
        placement: where it runs.
        place: in its generation.
        log_file_path: of its training thread's output.
        passed: the last barrier that it has passed, and what it was given there.
        sequence: of its last answer to a poll.
        generation: it is in.
        joined: how many rounds of reports there had been when it came.
        rounds: index of the last one that it has joined in.
        delivered: of the last one that it was told is delivered.
        undelivered: answers that have something of later rounds, or before them.
    """

    metadata: Any
    placement: PlacementGroup
    place: ray_private.DistributedContext
    log_file_path: str | None
    passed: tuple[int, Any]
    sequence: int
    generation: int
    joined: int
    rounds: int
    delivered: int
    undelivered: tuple[Polled, ...]


class ElasticWorker(ray_private.RayTrainWorker):
    """The actor of one worker: one process, one life, in as many generations as it lives to see.

    Threads: the actor's own answer Ray Train's calls (``init_train_context``, ``start_training``,
    ``poll_status``), one after the other, and must not block: a report is fetched or not there.
    One more, of concurrency group END, holds the sentinel ``await_end`` to the last. The training
    thread runs ``run_worker`` and in it the user's train loop; it alone calls ``take_seat``,
    at its safe point, so that what ``ray.train`` tells the user of rank and world changes between
    two steps. What it reports lies in Ray Train's queue, of one place, until it is polled.

    The process ends with the actor: killed by the host, with its node, or when it is retired after
    its last report was fetched.
    """

    def __init__(self) -> None:
        super().__init__()
        _make_room(ALONE | _own_gpu(str(os.getpid())))
        self._news = threading.Condition()  # guards the next three
        self._called = False  # the controller, which has answered
        self._end: str | None = None  # its training thread's error, "" for none
        self._sentinels = 0
        self._started = False
        self._seated = False
        self._joined = self._reports = self._delivered = 0
        self._undelivered: deque[Polled] = deque()
        self._made = train_calls.MadeReports()
        self._carried: deque[train_calls.WorkerRefused] = deque()
        self._answer = Polled(running=True)
        self._answering = threading.Lock()  # a poll by one controller, a look by the next
        self._polled_s = time.monotonic()
        # It takes seconds: Ray Train's calls, that come before the training thread, need not wait.
        self._importing = threading.Thread(target=_import_worker, name="import", daemon=True)
        self._importing.start()

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        actor = kwargs["synchronization_actor"]
        super().init_train_context(
            *args, **kwargs | {"synchronization_actor": train_calls.Meeting(actor)}
        )
        ray_private.set_train_fn_utils(train_calls.ElasticTrainFnUtils(self._made))

    def start_training(self, task: Task) -> None:
        self._started = True
        self.run_train_fn(ByValue(functools.partial(self._train, task)))

    @ray.method(concurrency_group=END)
    def await_end(self) -> str | None:
        """Blocks until the training thread has ended. Returns its error, or "".

        The call is the sentinel: it fails as soon as Ray knows that the process is gone. None:
        another controller asks by now.
        """
        with self._news:
            self._sentinels += 1
            mine = self._sentinels
            self._news.notify_all()
            self._news.wait_for(lambda: self._end is not None or self._sentinels > mine)
            if self._end is None:
                return None
        queue = ray_private.get_train_context().execution_context.result_queue
        deadline_s = time.monotonic() + FLUSH_S
        while not queue.empty() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return self._end

    @ray.method(concurrency_group=END)
    def await_called(self) -> None:
        """Blocks until the training thread has called the controller, or has ended."""
        with self._news:
            self._news.wait_for(lambda: self._called or self._end is not None)

    @ray.method(concurrency_group=END)
    def look(self) -> WorkerLook | None:
        """None before its training thread was started, or after it has ended: it is of no use."""
        if not self._started or self._end is not None:
            return None
        context = ray_private.get_train_context()
        passed = context.execution_context.synchronization_actor.passed
        placement = get_current_placement_group()
        assert placement is not None, "each worker has one"
        with self._answering:
            return WorkerLook(
                self.get_metadata(),
                placement,
                context.distributed_context,
                ray_private.get_train_application_worker_log_path(),
                (passed.sequence, passed.data),
                self._answer.sequence,
                context.collective_seq // train_calls.SEQUENCES,
                self._joined,
                passed.rounds,
                self._delivered,
                tuple(self._undelivered),
            )

    def poll_status(self, received: int = 0, delivered: int = 0) -> Polled:
        """Fetches at most one report. ``received``: sequence number of the last answer seen;
        ``delivered``: index of the last round that needs no telling any more."""
        self._polled_s = time.monotonic()
        with self._answering:
            self._delivered = max(delivered, self._delivered)
            while self._undelivered and self._undelivered[0].is_settled(self._delivered):
                self._undelivered.popleft()
            if self._answer.sequence <= received:
                self._answer_next(received + 1)
            return self._answer

    def _answer_next(self, sequence: int) -> None:
        status, made = super().poll_status(), train_calls.ReportMade()
        if status.training_report is not None:
            self._reports += 1
            made = self._made.reports.pop(self._reports, made)
        carried = tuple(self._carried.popleft() for _ in range(len(self._carried)))
        self._answer = Polled(
            **vars(status),
            sequence=sequence,
            report_index=self._reports,
            report_step=made.step,
            report_generation=made.generation,
            report_rank=made.rank,
            carried=carried,
        )
        if status.training_report is not None or carried:
            self._undelivered.append(self._answer)

    def take_seat(self, seat: WorkerSeat) -> None:
        """In the training thread, at its safe point: Ray Train's context of the new generation."""
        context = ray_private.get_train_context()
        context.distributed_context = seat.place
        context.collective_seq = seat.generation * train_calls.SEQUENCES
        context.preemption_context = ray_private.PreemptionContext()
        if not self._seated:
            self._seated = True
            context.report_call_index = context.current_report_index = seat.reports
            self._joined = self._reports = seat.reports
        for refused in self._made.refused:
            if refused.step <= seat.step:  # the others' steps are trained, and reported, again
                self._carried.append(refused)
        self._made.refused.clear()
        os.environ.update(
            RANK=str(seat.place.world_rank),
            WORLD_SIZE=str(seat.place.world_size),
            LOCAL_RANK=str(seat.place.local_rank),
            LOCAL_WORLD_SIZE=str(seat.place.local_world_size),
            NODE_RANK=str(seat.place.node_rank),
        )

    def _train(self, task: Task) -> Any:
        returned: list[Any] = []

        try:  # all of it: what failed untold would leave a worker that nobody waits for or replaces
            self._importing.join()  # two threads in one circle of imports see halves of modules
            from elastic_ft.worker.this_process import run_worker

            os.environ.update(_own_gpu(task.worker))
            loop = None if task.train_loop is None else cloudpickle.loads(task.train_loop)
            run_worker(
                task.address,
                task.key,
                _member_here(task),
                train_loop=None if loop is None else lambda: returned.append(loop()),
                on_generation=lambda extra: self.take_seat(decoder(WorkerSeat)(extra)),
                on_called=self._tell_called,
            )
        except BaseException as error:
            self._tell_end(f"{type(error).__name__}: {error}")
            raise
        self._tell_end("")
        return returned[0] if returned else None

    def _tell_called(self) -> None:
        with self._news:
            self._called = True
            self._news.notify_all()

    def _tell_end(self, end: str) -> None:
        with self._news:
            self._end = end
            self._news.notify_all()
        threading.Thread(target=self._free_in_the_end, name="free", daemon=True).start()

    def _free_in_the_end(self) -> None:
        """A controller ends it, once it has its last report. Without one its resources would be
        held for ever: nobody's driver owns them."""
        placement = get_current_placement_group()
        controller = f"{run_of(ray.get_runtime_context().get_actor_name() or '')}controller"
        self.await_nobody(lambda: actor_named(controller) is not None)
        log.warning("no controller is there to ask: this worker's place is free")
        if placement is not None:
            remove_placement_group(placement)  # and with it this process

    def await_nobody(self, is_led: Callable[[], bool], unasked_s: float = UNASKED_S) -> None:
        """Returns once nobody has polled for so long, and no controller is there that will: one
        that lives polls nobody while a user's callback blocks it."""
        self._polled_s = time.monotonic()
        while time.monotonic() < self._polled_s + unasked_s or is_led():
            time.sleep(unasked_s / LOOKS)


def _make_room(values: Mapping[str, str]) -> None:
    """So that these names can be set beside threads: a new one moves the environment, which who
    looks one up meanwhile reads after it was freed (SIGSEGV); another value of a known one does
    not. Python sees them when they are set."""
    for name, value in values.items():
        if name not in os.environ:
            os.putenv(name, value)


def _import_worker() -> None:
    with uncollected():
        from elastic_ft.worker import worker  # noqa: F401


def _own_gpu(worker: WorkerId) -> dict[str, str]:
    """The environment that shows this process its GPU alone, whatever Ray Train has set since."""
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1)
    return one_gpu(worker, gpus, in_use=gpus if share < 1 else ())


def _member_here(task: Task) -> Member:
    labels = ray.get_runtime_context().get_node_labels()
    domain = "/".join(str(labels.get(label, "")) for label in task.domain_labels).rstrip("/")
    host = os.uname().nodename
    return Member(task.worker, task.node, host, os.getpid(), find_raylet_pid(), domain)


def find_raylet_pid() -> int | None:
    """Of the node that this worker belongs to: what must die for the whole node to be lost. Who was
    forked from a template may be no child of it."""
    if told := os.environ.get("RAY_RAYLET_PID"):
        return int(told)
    for parent in psutil.Process().parents():
        if parent.name() == "raylet":
            return int(parent.pid)
    return None
