"""Ray Train's picture of the workers: it is given the membership, it never decides it.

``WorkerGroup`` keeps for Ray Train (callbacks, state manager, dashboard) who the members are, and
fetches their reports. It also knows how a Ray Train worker is made, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_ft.core.assignment import WorkerId
from elastic_ft.hosts.ray.names import NAMESPACE
from elastic_ft.hosts.ray.ray_private import (
    DistributedContext,
    PlacementGroupHandle,
    ReplicaGroup,
    StateManagerCallback,
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerStatus,
    bundle_to_remote_args,
    get_train_application_worker_log_path,
    shutdown_workers,
    time_monotonic,
)
from elastic_ft.hosts.ray.reports import Rounds
from elastic_ft.hosts.ray.worker_actor import (
    END,
    END_CALLS,
    ElasticWorker,
    Polled,
    Task,
    WorkerLook,
)

SHUTDOWN_PATIENCE_S = 2.0
IDLE_S = 2.0  # between two looks at workers that have nothing to report, as Ray Train's own


class NoPlacement(PlacementGroupHandle):
    """The host has one placement group per worker; Ray Train has nothing to manage."""

    @property
    def placement_group(self) -> Any:
        raise NotImplementedError("elastic_ft has a placement group per worker")

    def ready(self) -> Any:
        raise NotImplementedError("elastic_ft has a placement group per worker")

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


@dataclass(frozen=True)
class Picture(WorkerGroupState):
    """Its ``sync_actor`` is the controller itself: not to be killed with the group."""

    def shutdown(self) -> None:
        shutdown_workers(self.workers, SHUTDOWN_PATIENCE_S)


class ElasticWorkerGroup(WorkerGroup):
    """Attributes:
    rounds: takes the place of Ray Train's ReportCallbackHandler.
    on_flushed: called with a worker that has ended and whose last report is fetched.
    """

    rounds: Rounds
    on_flushed: Callable[[WorkerId], None] = staticmethod(lambda worker: None)

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._members: dict[WorkerId, Worker] = {}  # in rank order
        self._listening: dict[WorkerId, Worker] = {}  # and those that left, until flushed
        self._polls: dict[WorkerId, asyncio.Future[Polled]] = {}
        self._received: dict[WorkerId, int] = {}  # sequence number of the last answer
        self._flushed: dict[WorkerId, Polled] = {}  # ended and heard out: their last status
        self._started = False
        self._news = asyncio.Event()
        self._set_state([])
        for callback in self._callbacks:
            callback.before_worker_group_start(self._worker_group_context)

    # ------------------------------------------------------------- making a worker

    def create_actor(self, placement: PlacementGroup, name: str) -> ActorHandle[Any]:
        """Returns the handle at once; the process comes when ``placement`` has its resources.

        It outlives this one. Ray starts no other in its place: that would be a process with
        nothing, under a worker's name."""
        resources = self._worker_group_context.resources_per_worker
        environment = self._get_worker_runtime_env(
            custom_runtime_env=self._train_run_context.run_config.worker_runtime_env
        )
        actor_class = ray.remote(
            runtime_env=environment,
            concurrency_groups={END: END_CALLS},
            max_restarts=0,
            lifetime="detached",
            name=name,
            namespace=NAMESPACE,
            **bundle_to_remote_args(resources),
        )(ElasticWorker)
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=0)
        return actor_class.options(scheduling_strategy=strategy).remote()

    async def meet(self, actor: ActorHandle[Any]) -> Worker:
        """Returns who ``actor`` is and where, once it is up."""
        resources = self._worker_group_context.resources_per_worker
        return Worker(
            actor, await actor.get_metadata.remote(), resources, placement_group_bundle_index=0
        )

    def meet_survivor(self, worker: WorkerId, actor: ActorHandle[Any], look: WorkerLook) -> Worker:
        """Returns one that an earlier controller has started. From any thread."""
        self._received[worker] = look.sequence
        return Worker(
            actor,
            look.metadata,
            self._worker_group_context.resources_per_worker,
            look.place,
            look.log_file_path,
            placement_group_bundle_index=0,
        )

    async def start_worker(self, worker: Worker, task: Task, controller: ActorHandle[Any]) -> None:
        """Gives the worker its train context and starts its training thread."""
        worker.distributed_context = DistributedContext(0, 1, 0, 1, 0)  # until it has a seat
        arguments: dict[str, Any] = {}
        for callback in self._execution_group_callbacks:
            found = callback.before_init_train_context([worker])
            arguments.update({name: values[0] for name, values in found.items()})
        await worker.actor.init_train_context.remote(
            train_run_context=self._train_run_context,
            distributed_context=worker.distributed_context,
            synchronization_actor=controller,
            storage_context=self._storage_context,
            worker_callbacks=self._worker_callbacks_to_propagate,
            controller_actor=controller,
            **arguments,
        )
        await asyncio.get_running_loop().run_in_executor(None, self._replica_started, worker)
        worker.log_file_path = await worker.execute_async(get_train_application_worker_log_path)
        await worker.actor.start_training.remote(task)

    def _replica_started(self, worker: Worker) -> None:
        replica = ReplicaGroup([worker], worker.resources)
        for callback in self._replica_group_callbacks:
            callback.after_replica_group_start(replica)

    # -------------------------------------------------------------- the membership

    @property
    def members(self) -> tuple[WorkerId, ...]:
        return tuple(self._members)

    def adopt(self, members: dict[WorkerId, Worker], controller: ActorHandle[Any]) -> None:
        """Takes over a membership that has formed. ``members``: in rank order."""
        self.wake()
        self._members = members
        self._listening.update(members)
        self._dismiss()
        self._set_state(list(members.values()), controller)
        context = self._worker_group_context
        self._worker_group_context = dataclasses.replace(context, num_workers=len(members))
        self._replica_groups = [
            ReplicaGroup([worker], worker.resources, self._replica_group_callbacks)
            for worker in members.values()
        ]
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(members))}
        if not self._started:
            self._started = True
            for callback in self._callbacks:
                if callback not in self._replica_group_callbacks:  # those had each worker already
                    callback.after_worker_group_start(self)
            for callback in self._callbacks:
                callback.after_worker_group_training_start(self)
        else:
            self._show_members()

    def _show_members(self) -> None:
        """In Ray's state: the dashboard's Train tab shows the workers of the run attempt."""
        for callback in self._callbacks:
            if isinstance(callback, StateManagerCallback):
                callback._state_manager.update_train_run_attempt_running(
                    run_id=callback._run_id,
                    attempt_id=self._worker_group_context.run_attempt_id,
                    workers=self.get_workers(),
                )

    def _set_state(self, workers: list[Worker], controller: ActorHandle[Any] | None = None) -> None:
        old = self._worker_group_state
        self._worker_group_state = Picture(
            start_time=old.start_time if old else time_monotonic(),
            placement_group_handle=NoPlacement(),
            workers=workers,
            sync_actor=controller,
        )

    def lose(self, worker: WorkerId) -> None:
        """The worker's process is gone: what it had not handed over is gone with it."""
        poll = self._polls.pop(worker, None)
        if poll is not None and poll.done():
            self._take(worker, poll)
        self._listening.pop(worker, None)
        self.rounds.lose(worker)

    def ended(self, worker: WorkerId) -> None:
        """The worker's training thread has ended in good order."""
        self.wake()
        if worker not in self._listening and worker not in self._members:
            self.on_flushed(worker)

    def _dismiss(self) -> None:
        """Those who have ended and are heard out are needed no more, the members excepted."""
        for worker in [w for w in self._flushed if w not in self._members]:
            del self._flushed[worker]
            self.on_flushed(worker)

    # ---------------------------------------------------------------------- polling

    def wake(self) -> None:
        """There may be something to fetch, or nothing more to wait for. In the event loop."""
        self._news.set()

    async def rest(self, interval_s: float) -> None:
        """Until it is time for the next ``poll``: after ``interval_s`` where reports are awaited.
        Each one takes a call of every worker, and time from its training."""
        await asyncio.sleep(interval_s)
        if not self.rounds.is_awaiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, IDLE_S - interval_s))
        self._news.clear()

    async def poll(self, timeout_s: float) -> WorkerGroupPollStatus:
        """Fetches what the workers have to report. Who does not answer is asked no second time."""
        for worker, handle in self._listening.items():
            if worker not in self._polls and not self.rounds.is_full:
                received = self._received.get(worker, 0)
                polled = _poll(handle.actor, received, self.rounds.delivered)
                self._polls[worker] = asyncio.ensure_future(polled)
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=timeout_s)
        for worker, poll in list(self._polls.items()):
            if poll.done():
                del self._polls[worker]
                self._take(worker, poll)
        self.rounds.deliver()
        self._latest_poll_status = self.status()
        for callback in self._callbacks:
            callback.after_worker_group_poll_status(self._latest_poll_status)
        return self._latest_poll_status

    def _take(self, worker: WorkerId, poll: asyncio.Future[Polled]) -> None:
        try:
            status = poll.result()
        except RayActorError:  # the sentinel knows more, and tells
            return
        self._received[worker] = status.sequence
        self.rounds.take(worker, status)
        if status.training_report is None and not status.running:
            self._listening.pop(worker, None)
            self._flushed[worker] = status
            self._dismiss()

    def status(self, *, finished: bool = False) -> WorkerGroupPollStatus:
        """What Ray Train's loop sees: all is well. Errors are elastic_ft's own business."""
        statuses: dict[int, WorkerStatus] = {}
        for rank, worker in enumerate(self._members):
            last = self._flushed.get(worker)
            value = last.return_value if finished and last is not None else None
            statuses[rank] = WorkerStatus(running=not finished, return_value=value)
        if finished and not statuses:  # nobody took part: without one Ray Train would wait on
            statuses[0] = WorkerStatus(running=False)
        return WorkerGroupPollStatus(statuses, self._worker_rank_to_replica_group_rank)

    @property
    def flushed(self) -> bool:
        """Whether every worker that ever took part has ended, or is gone, and is heard out."""
        return not self._listening


async def _poll(actor: ActorHandle[Any], received: int, delivered: int) -> Polled:
    return await actor.poll_status.remote(received, delivered)  # type: ignore[no-any-return]


def seats(nodes: Sequence[str]) -> list[DistributedContext]:
    """Each rank's place: its rank on its node, how many share the node, the node's index."""
    order = list(dict.fromkeys(nodes))
    return [
        DistributedContext(
            world_rank=rank,
            world_size=len(nodes),
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            node_rank=order.index(node),
        )
        for rank, node in enumerate(nodes)
    ]
