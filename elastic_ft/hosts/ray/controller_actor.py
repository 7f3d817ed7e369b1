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
import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import Assignment, WorkerId
from elastic_ft.core.state import State
from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.hosts.ray import ray_private, submission
from elastic_ft.hosts.ray.controller_thread import ControllerThread
from elastic_ft.hosts.ray.hosted import Launch
from elastic_ft.hosts.ray.lives import call_until, is_restarted_actor
from elastic_ft.hosts.ray.names import RunNames, run_of
from elastic_ft.hosts.ray.placement_groups import Placements
from elastic_ft.hosts.ray.ray_host import RayHost
from elastic_ft.hosts.ray.reports import Barrier, Rounds
from elastic_ft.hosts.ray.started_by import executable_of
from elastic_ft.hosts.ray.trainer_parts import ElasticResult, JobFailedError, as_checkpoint
from elastic_ft.hosts.ray.warm_standby import Standbys, end_standbys
from elastic_ft.hosts.ray.worker_actor import WorkerLook
from elastic_ft.hosts.ray.worker_group import ElasticWorkerGroup
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.tls import JobKey

log = logging.getLogger(__name__)
POLL_S = 0.2  # how often reports are fetched; a worker can have one waiting
FLUSH_S = 15.0  # after the job's end, for the last reports
STOP_S = 30.0
CURRENT_TIMEOUT_S = 5.0
SUPERSEDED = 75  # exit code (EX_TEMPFAIL)
UNREAD = 74  # exit code (EX_IOERR)
ALIVE = "alive"  # the concurrency group of what is answered while all else blocks
ALIVE_CALLS = 100  # at once
LINGER_S = 5.0  # after the job's end, for drivers to be told


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


class ElasticController(ray_private.TrainController):
    """The actor in which a job is run: Ray Train's controller, which follows elastic_ft's.

    Threads: the actor's event loop runs Ray Train's loop (``_step``, the polls, its callbacks) and
    answers workers and drivers (``broadcast_from_rank_zero``, ``await_result``). It may block on
    Ray Train's callbacks, a user's among them; nobody else waits for it: ``ControllerThread`` runs
    elastic_ft's controller, ``RayHost`` has an event loop in a third thread, and calls of
    concurrency group ALIVE have one in a fourth. Nothing here decides about the membership: this
    loop waits for generation 1, mirrors each later one into the worker group (``adopt``, ``lose``,
    ``ended`` come into the loop with ``call_soon_threadsafe``), delivers reports, and ends with the
    other's result.

    Its life: ``_execute_resize_decision``, called once, starts host and thread; ``_poll_workers``
    goes on until the thread has ended, fetches the last reports, and returns or raises how the job
    ended; ``_shutdown_worker_group`` asks the thread to stop if it still runs, and frees all.
    It is detached: its driver may go. Ray restarts it when it dies; it begins by itself, from what
    was submitted (``submission``), and goes on with the run folder. Once the job has ended it tells
    whoever waits, and ends for good.
    """

    worker_group_cls = ElasticWorkerGroup

    def __init__(self, submitted: submission.Submitted, key: JobKey) -> None:
        self._key = key
        self._starts = submission.Starts(submitted)
        try:
            self._starts.count()
            self._submitted, self._submission = submitted, submission.read_submission(submitted)
        except StoreFailed as error:  # raised here, it would end the actor: Ray tries again so
            log.error("the controller ends, for another to begin: %s", error)
            os._exit(UNREAD)
        except JobFailed:  # nobody begins again
            end_standbys(run_of(ray.get_runtime_context().get_actor_name() or ""))
            raise
        self._standbys: Standbys | None = None
        if (standby := self._submission.standby) is not None:
            self._standbys = Standbys(standby)
            self._standbys.start()
        self._hosting: Hosting | None = None
        self._asking = threading.Lock()  # calls of group ALIVE come in a thread of their own
        self._asked: list[str] = []  # to stop, before there is anything to be stopped
        self._is_resumed = False  # with workers that train, and are not yet members here
        self._is_over = asyncio.Event()
        super().__init__(**self._submission.trainer)
        callbacks = self._worker_group_callbacks_to_propagate
        self._worker_group_callbacks_to_propagate = [
            c
            for c in callbacks
            if not isinstance(
                c, (ray_private.PreemptionCallback, ray_private.ReportCallbackHandler)
            )
        ]
        self._delivered = submission.DeliveredNote(submitted)
        self._rounds = Rounds(
            self._report_handler._report_callbacks,
            self._checkpoint_manager._current_report_index,
            lambda: self._here.state.committed,
            self._delivered.note,
        )
        self._barrier = Barrier(self._is_fenced, self._open_round)
        if ray_private.HEALTH_CHECK_INTERVAL_S_ENV_VAR not in os.environ:
            self._health_check_interval_s = POLL_S
        self._itself = ray.get_runtime_context().current_actor
        self._running: asyncio.Task[None] | None = None
        if (trial := self._submission.trial) is not None:
            trial.watch(self._pass_on)
        threading.Thread(target=self._call_begin, name="begin", daemon=True).start()

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
        await self._until_known()
        return await self._barrier.join(
            world_rank, world_size, data, caller_method_name, collective_seq
        )

    def _call_begin(self) -> None:
        """A restarted actor is called by nobody else."""
        call_until(lambda: self._running is not None, self._itself.begin.remote)

    async def _until_known(self) -> None:
        """A restarted controller does not know at once which generation there is. It does, or
        ends: refused before, one worker would leave a collective that another waits in."""
        while not self._is_over.is_set():
            if (hosting := self._hosting) is not None:
                if hosting.state.assignment is not None:
                    return
                if not hosting.thread.is_alive():
                    return
            await asyncio.sleep(POLL_S / 10)

    async def begin(self) -> None:
        """On the actor's event loop. Idempotent."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        """Runs the job to its end, or to where another controller has it."""
        try:
            await self.run()
        finally:
            is_ours = self._hosting is None or not self._hosting.host.is_left
            self._delivered.close()
            self._starts.close()
            if self._standbys is not None:
                self._standbys.close()
            if is_ours:
                if self._standbys is not None:  # first: who can't begin again has nobody to end
                    await self._standbys.end()
                submission.forget_submission(self._submitted)
            self._is_over.set()
            await asyncio.sleep(LINGER_S)
            if is_ours or await self._is_current():
                ray.kill(self._itself)
            else:
                os._exit(SUPERSEDED)

    async def _is_current(self) -> bool:
        """Whether Ray takes this process for the actor: on a node that was cut off it does not."""
        try:
            asked = asyncio.ensure_future(self._itself.process.remote())
            return bool(await asyncio.wait_for(asked, CURRENT_TIMEOUT_S) == await self.process())
        except (RayError, TimeoutError):
            return False

    @ray.method(concurrency_group=ALIVE)
    async def process(self) -> tuple[str, int]:
        """Answered at once, whatever waits or blocks in Ray Train's loop."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def await_result(self) -> ray_private.Result:
        """Returns how the job ended, once it has. Any number of drivers may wait."""
        await self._is_over.wait()
        return self.get_result()

    @ray.method(concurrency_group=ALIVE)
    async def stop(self, reason: str) -> None:
        """Asks for a clean stop; the second time, for an immediate one."""
        self._pass_on(reason)

    @ray.method(concurrency_group=ALIVE)
    async def hear_trial(self, is_over: bool) -> None:
        """Of the trial in which it was started: over it may be, and its process live on."""
        assert self._submission.trial is not None
        self._submission.trial.hear(is_over)

    def _pass_on(self, reason: str) -> None:
        with self._asking:
            if self._hosting is None:
                self._asked.append(reason)
                return
        self._hosting.thread.stop(reason)

    # ----------------------------------------------------------------- Ray Train's loop

    async def _step(self) -> ray_private.TrainControllerLoopIterationResult:
        state = self.get_state()
        if not isinstance(state, ray_private.SchedulingState):
            return await super()._step()
        if self._hosting is None:
            assert isinstance(state.scaling_decision, ray_private.ResizeDecision)
            return self._execute_resize_decision(state.scaling_decision)
        await asyncio.sleep(self._health_check_interval_s / 4)
        here = self._here.state
        if self._is_resumed and here.phase == "running" and here.assignment is not None:
            self._is_resumed = False
            self._here.host.formed(here.assignment)  # an earlier controller saw it form
        formed = self._here.group.members or not self._here.thread.is_alive()
        return self._turn_to(ray_private.RunningState() if formed else state)

    def _turn_to(
        self, state: ray_private.TrainControllerState
    ) -> ray_private.TrainControllerLoopIterationResult:
        attempt = self._get_run_attempt_id()
        return ray_private.TrainControllerLoopIterationResult(attempt, self.get_state(), state)

    def _execute_resize_decision(
        self, decision: ray_private.ResizeDecision
    ) -> ray_private.TrainControllerLoopIterationResult:
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
        thread = ControllerThread(
            lambda: self._make_controller(host), lambda: loop.call_soon_threadsafe(group.wake)
        )
        with self._asking:
            self._hosting = Hosting(group, host, thread, loop)
        for reason in self._asked:
            thread.stop(reason)
        thread.start()
        return self._turn_to(ray_private.SchedulingState(decision))

    async def _poll_workers(self) -> ray_private.WorkerGroupPollStatus:
        """All is well, until the job has ended: then finished, or the error."""
        group, thread = self._here.group, self._here.thread
        if thread.is_alive():
            await group.rest(self._health_check_interval_s)
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
        self._rounds.is_ending = True
        deadline_s = time.monotonic() + FLUSH_S
        while not self._here.group.flushed and time.monotonic() < deadline_s:
            await self._here.group.poll(self._health_check_interval_s)
        await self._rounds.finish()

    def _shutdown_worker_group(self) -> None:
        if self._hosting is None:  # it failed to start
            super()._shutdown_worker_group()
            return
        thread = self._here.thread
        for _ in range(2):  # the second request is obeyed at once
            if thread.is_alive():
                thread.stop("Ray Train's controller shuts down")
        thread.join(STOP_S)
        if self._here.host.is_left:  # the workers are another controller's
            self._worker_group = None
            return
        super()._shutdown_worker_group()
        self._here.host.release()

    def _build_result(self) -> ray_private.Result:
        """Ray Train's result; where no checkpoint was reported to it, elastic_ft's newest."""
        result = super()._build_result()
        ended = self._hosting.thread.result if self._hosting is not None else None
        if result.metrics is None:
            result = dataclasses.replace(result, metrics=self._rounds.last_metrics or ended)
        if result.checkpoint is None and ended and ended["checkpoints"]:
            result = dataclasses.replace(
                result, checkpoint=as_checkpoint(self._submission.checkpoint_url)
            )
        values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        status, reason = (ended["status"], ended["reason"]) if ended else ("failed", "")
        return ElasticResult(**values, status=status, reason=reason)

    # ------------------------------------------------------------- elastic_ft's controller

    def _make_controller(self, host: RayHost) -> Controller:
        if is_restarted_actor():
            # Torch is imported before the job is taken over, not while workers that have called
            # wait for their welcome: what they are told by then has deadlines.
            importlib.import_module("elastic_ft.groups.store_links")
        run = self._submission
        controller = Controller(
            run.job,
            host,
            RunFolder(run.run_url),
            run.checkpoint_url,
            address=ray.util.get_node_ip_address(),
            faults=run.faults,
            accept_changes=run.accept_changes,
            key=self._key,
        )
        controller.on_step = lambda line: self._starts.trained()
        return controller

    def _launch(
        self,
        decision: ray_private.ResizeDecision,
        group: ElasticWorkerGroup,
        loop: asyncio.AbstractEventLoop,
    ) -> Launch:
        def on_formed(assignment: Assignment, members: dict[WorkerId, ray_private.Worker]) -> None:
            self._rounds.formed(assignment.generation, assignment.source.step)
            if len(members) == len(assignment.members):
                loop.call_soon_threadsafe(group.adopt, members, self._itself)

        train_loop = self._train_fn_ref.get()
        selector = self._train_run_context.scaling_config.label_selector
        return Launch(
            names=RunNames(self._submission.job.name, self._submission.run_url),
            owner=self._owner,
            placements=Placements(
                prefix=f"{self._submission.prefix}place/",
                bundle=decision.resources_per_worker,
                label_selector=selector if isinstance(selector, dict) else None,
                workers_per_node=self._submission.job.elastic.workers_per_node,
            ),
            train_loop=None if train_loop is None else cloudpickle.dumps(train_loop),
            controller=self._itself,
            on_formed=on_formed,
            on_lost=partial(loop.call_soon_threadsafe, group.lose),
            on_ended=partial(loop.call_soon_threadsafe, group.ended),
            on_survivors=self._resume,
            reports=lambda: self._rounds.opened,
            domain_labels=self._submission.job.snapshot.domain_labels,
            start_timeout_s=self._submission.job.elastic.start_timeout_s,
            executable=executable_of(self._train_run_context.run_config),
        )

    def _resume(self, looks: Mapping[WorkerId, WorkerLook]) -> None:
        """Goes on with the reports of workers that an earlier controller has started. From the
        host's thread; nothing is asked for them yet."""
        if not looks:
            return
        self._is_resumed = True
        self._barrier.resume(look.passed for look in looks.values())
        self._rounds.resume(looks, self._delivered.before())
        self._checkpoint_manager._current_report_index = self._rounds.delivered

    def _owner(self) -> int:
        controller = self._here.thread.controller
        assert controller is not None, "it has not begun"
        return controller.owner

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
        self._here.group.wake()
