"""Ray Train's controller, following elastic_ft's: see docs/adr/0001-ray-train-follows.md.

Ray Train's loop                     elastic_ft's controller, in a thread of the same actor
----------------                     -------------------------------------------------------
SCHEDULING   <- until the first      starts, gathers workers, forms generation 1
                generation is formed
RUNNING      <- polls reports,       fences, forms, commits: as the core decides
                mirrors the members
SHUTTING_DOWN <- job ended           result.json
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow
import ray
from ray.train import Checkpoint, TrainingFailedError

from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.core.events import Assignment, WorkerId
from elastic_ft.core.state import State
from elastic_ft.errors import JobFailed
from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.placement_groups import Placements
from elastic_ft.hosts.ray.ray_host import Launch, RayHost
from elastic_ft.hosts.ray.ray_metrics import RayMetrics
from elastic_ft.hosts.ray.ray_private import (
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    FailureDecision,
    FailurePolicy,
    NoopDecision,
    PreemptionCallback,
    ReportCallbackHandler,
    ResizeDecision,
    Result,
    RunningState,
    ScalingPolicy,
    SchedulingState,
    TrainController,
    TrainControllerLoopIterationResult,
    TrainControllerState,
    Worker,
    WorkerGroupPollStatus,
)
from elastic_ft.hosts.ray.reports import Barrier, Rounds
from elastic_ft.hosts.ray.worker_group import ElasticWorkerGroup
from elastic_ft.observe.run_folder import RunFolder

log = logging.getLogger(__name__)
POLL_S = 0.2  # how often reports are fetched; a worker can have one waiting
FLUSH_S = 15.0  # after the job's end, for the last reports
STOP_S = 30.0


@dataclass(frozen=True)
class FollowedRun:
    """One start of a controller for a job.

    Attributes:
        run_url: the run folder; an earlier run in it is continued.
        attempt: 0, then one more for each controller that died.
        placements: prefix of the names of placement groups.
    """

    job: Job
    run_url: str
    checkpoint_url: str
    attempt: int
    placements: str
    faults: tuple[PointFault, ...] = ()
    accept_changes: bool = False


class JobFailedError(JobFailed, TrainingFailedError):
    """What ``ElasticTrainer.fit`` raises, and ``Result.error`` holds, when the job has failed."""


@dataclass
class ElasticResult(Result):  # type: ignore[misc]
    """Ray Train's result, and how the job ended: neither end below is an error.

    Attributes:
        status: completed, or stopped: someone asked for it, and a rerun goes on from there.
        reason: in words.
    """

    status: str = ""
    reason: str = ""


class WholeJobPolicy(ScalingPolicy):
    """One group for the whole job. Pending placement groups are the autoscaler's demand."""

    def after_controller_start(self, train_run_context: Any) -> None:
        return None

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        config = self.scaling_config
        return ResizeDecision(config.max_workers, config._resources_per_worker_not_none)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> NoopDecision:
        return NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)


class RaiseAlways(FailurePolicy):
    """What reaches Ray Train as a failure is final: recovery is elastic_ft's, and is over."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        return FailureDecision.RAISE


class ControllerThread(threading.Thread):
    """Attributes:
    result: what is in result.json, once the job has ended.
    error: why there is none.
    """

    def __init__(self, make: Callable[[], Controller]) -> None:
        super().__init__(name="elastic-controller", daemon=True)
        self._make = make
        self.controller: Controller | None = None
        self.result: dict[str, Any] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.controller = self._make()
            with RayMetrics(self.controller.metrics.registry):
                self.result = self.controller.run()
        except BaseException as error:  # told to Ray Train's loop, which ends the run with it
            log.exception("elastic_ft's controller failed")
            self.error = error


@dataclass
class Hosting:
    """What there is from the first resize decision on.

    Attributes:
        loop: Ray Train's, of this actor.
    """

    group: ElasticWorkerGroup
    host: RayHost
    thread: ControllerThread
    loop: asyncio.AbstractEventLoop

    @property
    def state(self) -> State:
        """Of the core; replaced whole at each step, so that any thread may look."""
        return self.thread.controller.state if self.thread.controller is not None else State()


class ElasticController(TrainController):
    """The actor in which a job is run: Ray Train's controller, which follows elastic_ft's.

    Threads: the actor's event loop runs Ray Train's loop (``_step``, the polls, its callbacks) and
    answers workers and drivers (``broadcast_from_rank_zero``, ``stop``). ``ControllerThread`` runs
    elastic_ft's controller. ``RayHost`` has an event loop in a third. Nothing here decides about
    the membership: this loop waits for generation 1, mirrors each later one into the worker group
    (``adopt``, ``lose``, ``ended`` come into the loop with ``call_soon_threadsafe``), delivers
    reports, and ends with the other's result. It may block on Ray Train's callbacks, a user's among
    them: neither of the other two waits for it.

    Its life: ``_execute_resize_decision``, called once, starts host and thread; ``_poll_workers``
    goes on until the thread has ended, fetches the last reports, and returns or raises how the job
    ended; ``_shutdown_worker_group`` asks the thread to stop if it still runs, and frees all.
    An actor that dies is followed by another one (``ElasticTrainer``), which continues the run
    folder.
    """

    worker_group_cls = ElasticWorkerGroup

    def __init__(self, *, run: FollowedRun, **kwargs: Any) -> None:
        self._run = run
        self._hosting: Hosting | None = None
        super().__init__(**kwargs)
        callbacks = self._worker_group_callbacks_to_propagate
        self._worker_group_callbacks_to_propagate = [
            c for c in callbacks if not isinstance(c, (PreemptionCallback, ReportCallbackHandler))
        ]
        self._rounds = Rounds(
            self._report_handler._report_callbacks,
            self._checkpoint_manager._current_report_index,
            lambda: self._here.state.committed,
        )
        self._barrier = Barrier(self._is_fenced, self._open_round)
        if HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ:
            self._health_check_interval_s = POLL_S

    @property
    def _here(self) -> Hosting:
        assert self._hosting is not None, "no worker group has been started"
        return self._hosting

    # --------------------------------------------------------- called by actors, drivers

    async def broadcast_from_rank_zero(
        self,
        world_rank: int,
        world_size: int,
        data: Any,
        caller_method_name: str,
        collective_seq: int,
        relaxable: bool = False,
    ) -> Any:
        """The workers' barrier: the controller is its own SynchronizationActor."""
        return await self._barrier.join(
            world_rank, world_size, data, caller_method_name, collective_seq
        )

    async def stop(self, reason: str) -> None:
        """Asks for a clean stop; the second time, for an immediate one."""
        if self._hosting is not None and self._hosting.thread.controller is not None:
            self._hosting.thread.controller.stop(reason)

    # ----------------------------------------------------------------- Ray Train's loop

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        if not isinstance(state, SchedulingState):
            return await super()._step()
        if self._hosting is None:
            assert isinstance(state.scaling_decision, ResizeDecision)
            return self._execute_resize_decision(state.scaling_decision)
        await asyncio.sleep(self._health_check_interval_s / 4)
        formed = self._here.group.members or not self._here.thread.is_alive()
        return self._turn_to(RunningState() if formed else state)

    def _turn_to(self, state: TrainControllerState) -> TrainControllerLoopIterationResult:
        attempt = self._get_run_attempt_id()
        return TrainControllerLoopIterationResult(attempt, self.get_state(), state)

    def _execute_resize_decision(
        self, decision: ResizeDecision
    ) -> TrainControllerLoopIterationResult:
        """Called once: starts elastic_ft's controller, which starts the workers."""
        hook = "before_controller_execute_resize_decision"
        if failure := self._run_controller_hook(hook, decision):
            return failure
        self._start_worker_group(decision.num_workers, decision.resources_per_worker)
        group = self._worker_group
        assert isinstance(group, ElasticWorkerGroup)
        loop = asyncio.get_running_loop()
        host = RayHost(group, self._launch(decision, group, loop))
        group.rounds, group.on_flushed = self._rounds, host.retire
        thread = ControllerThread(lambda: self._make_controller(host))
        self._hosting = Hosting(group, host, thread, loop)
        thread.start()
        return self._turn_to(SchedulingState(decision))

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        """All is well, until the job has ended: then finished, or the error."""
        await asyncio.sleep(self._health_check_interval_s)
        group, thread = self._here.group, self._here.thread
        status = await group.poll(self._health_check_interval_s)
        if thread.is_alive():
            return status
        await self._flush()
        if thread.result is None:
            raise JobFailedError(f"the controller failed: {thread.error!r}") from thread.error
        if thread.result["status"] not in ("completed", "stopped"):
            raise JobFailedError(f"{thread.result['status']}: {thread.result['reason']}")
        return group.status(finished=True)

    async def _flush(self) -> None:
        """Fetches the last reports."""
        deadline_s = time.monotonic() + FLUSH_S
        while not self._here.group.flushed and time.monotonic() < deadline_s:
            await self._here.group.poll(self._health_check_interval_s)
        self._rounds.deliver_carried()

    def _shutdown_worker_group(self) -> None:
        if self._hosting is None:  # it failed to start
            super()._shutdown_worker_group()
            return
        thread = self._here.thread
        for _ in range(2):  # the second request is obeyed at once
            if thread.is_alive() and thread.controller is not None:
                thread.controller.stop("Ray Train's controller shuts down")
        thread.join(STOP_S)
        super()._shutdown_worker_group()
        self._here.host.release()

    def _build_result(self) -> Result:
        """Ray Train's result; where no checkpoint was reported to it, elastic_ft's newest."""
        result = super()._build_result()
        ended = self._hosting.thread.result if self._hosting is not None else None
        if result.metrics is None:
            result = dataclasses.replace(result, metrics=self._rounds.last_metrics or ended)
        if result.checkpoint is None and ended and ended["checkpoints"]:
            result = dataclasses.replace(result, checkpoint=as_checkpoint(self._run.checkpoint_url))
        values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        status, reason = (ended["status"], ended["reason"]) if ended else ("failed", "")
        return ElasticResult(**values, status=status, reason=reason)

    # ------------------------------------------------------------- elastic_ft's controller

    def _make_controller(self, host: RayHost) -> Controller:
        run = self._run
        return Controller(
            run.job,
            host,
            RunFolder(run.run_url),
            run.checkpoint_url,
            address=ray.util.get_node_ip_address(),
            faults=run.faults,
            accept_changes=run.accept_changes,
        )

    def _launch(
        self,
        decision: ResizeDecision,
        group: ElasticWorkerGroup,
        loop: asyncio.AbstractEventLoop,
    ) -> Launch:
        own_handle = ray.get_runtime_context().current_actor

        def on_formed(assignment: Assignment, members: dict[WorkerId, Worker]) -> None:
            self._rounds.formed(assignment.generation, assignment.source.step)
            if len(members) == len(assignment.members):
                loop.call_soon_threadsafe(group.adopt, members, own_handle)

        def on_lost(worker: WorkerId) -> None:
            loop.call_soon_threadsafe(group.lose, worker)

        def on_ended(worker: WorkerId) -> None:
            loop.call_soon_threadsafe(group.ended, worker)

        selector = self._train_run_context.scaling_config.label_selector
        return Launch(
            prefix=f"r{self._run.attempt}" if self._run.attempt else "",
            placements=Placements(
                prefix=self._run.placements,
                bundle=decision.resources_per_worker,
                label_selector=selector if isinstance(selector, dict) else None,
                workers_per_node=self._run.job.elastic.workers_per_node,
            ),
            train_loop=self._train_fn_ref.get(),
            controller=own_handle,
            on_formed=on_formed,
            on_lost=on_lost,
            on_ended=on_ended,
            reports=lambda: self._rounds.opened,
            domain_label=self._run.job.snapshot.domain_label,
            start_timeout_s=self._run.job.elastic.start_timeout_s,
        )

    def _is_fenced(self, generation: int) -> bool:
        """Whether a collective of ``generation`` can't complete any more (I1)."""
        state = self._here.state
        if state.assignment is None or state.assignment.generation != generation:
            return True
        breaking = state.phase == "pausing" and state.abort
        return breaking or state.phase in ("suspended", "ended")

    def _open_round(self, generation: int) -> None:
        assignment = self._here.state.assignment
        assert assignment is not None and assignment.generation == generation
        self._rounds.open(generation, (member.worker for member in assignment.members))


def as_checkpoint(url: str) -> Checkpoint | None:
    """Ray Train's handle of the checkpoints' folder; None where pyarrow does not know the URL."""
    try:
        return Checkpoint(url)
    except (pyarrow.ArrowException, OSError) as error:
        log.warning("Result.checkpoint is left out: %s: %s", url, error)
        return None
