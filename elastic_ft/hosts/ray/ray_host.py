"""``controller.host.Host`` on Ray: an actor in a placement group per worker, a sentinel on it.

Runs on an event loop in a thread of its own, beside Ray Train's: a callback that blocks there (an
upload, a slow tracker) does not delay the news of a death here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from elastic_ft.controller.host import Tell
from elastic_ft.core.assignment import KEEPER, Assignment, NodeId, WorkerId
from elastic_ft.core.events import NodeDraining, NodeLost, WorkerLost
from elastic_ft.hosts.ray.allowed_places import AllowedPlaces
from elastic_ft.hosts.ray.causes import KILLED, why_gone
from elastic_ft.hosts.ray.cluster_nodes import ClusterNodes, ask_gcs
from elastic_ft.hosts.ray.hosted import Hosted, Launch
from elastic_ft.hosts.ray.keeper_actor import Keepers
from elastic_ft.hosts.ray.lives import is_restarted_actor
from elastic_ft.hosts.ray.names import reap
from elastic_ft.hosts.ray.placement_groups import node_of
from elastic_ft.hosts.ray.ray_private import Worker
from elastic_ft.hosts.ray.survivors import find_survivors
from elastic_ft.hosts.ray.worker_actor import Task, WorkerSeat
from elastic_ft.hosts.ray.worker_group import ElasticWorkerGroup, seats
from elastic_ft.transport.tls import JobKey

log = logging.getLogger(__name__)
ASK_AGAIN_S = 0.2
PLACED_POLL_S = 5.0
EQUIP_TIMEOUT_S = 120.0  # from a live actor to its training thread: train context, callbacks
RETRY_S = (0.0, 0.2, 1.0, 5.0, 15.0)  # before the next worker, when one after another dies early
EARLY_S = 20.0
CLOSE_TIMEOUT_S = 10.0


class RayHost:
    """Keeps workers alive, and tells of their ends and of their nodes'.

    Attributes:
        is_left: the job is another controller's, and so are the workers.
    """

    successor_within_s = 60.0  # Ray starts its actor again, elsewhere if it must

    def __init__(self, group: ElasticWorkerGroup, launch: Launch) -> None:
        self._group, self._launch = group, launch
        self._hosted: dict[WorkerId, Hosted] = {}
        self._placements = launch.placements
        self._nodes = ClusterNodes()
        self._wanted, self._count, self._failures = 0, 0, 0
        self._places = AllowedPlaces()
        self._closed = self.is_left = False
        self._begun, self._cleared = asyncio.Event(), asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self._inbox: Tell = lambda event: None
        self._address: tuple[str, int] = ("", 0)
        self._key = JobKey(b"")
        self._loop = asyncio.new_event_loop()
        self._keepers = Keepers(launch.names, self._nodes.lost, launch.executable)
        self._thread = threading.Thread(target=self._run, name="ray-host", daemon=True)

    # ------------------------------------------------------------------------ Host

    def survivors(self) -> frozenset[WorkerId]:
        self._thread.start()
        found = asyncio.run_coroutine_threadsafe(self._adopt(), self._loop)
        return found.result()

    async def _adopt(self) -> frozenset[WorkerId]:
        if not is_restarted_actor():
            return frozenset()  # those that live have another submission's key: they save and end
        found = await find_survivors(self._launch.names)
        for worker, actor in found.actors.items():
            look = found.looks[worker]
            handle = self._group.meet_survivor(worker, actor, look)
            hosted = Hosted(worker, look.placement, actor, handle, handle.metadata.node_id)
            self._hosted[worker] = hosted
            self._nodes.used.add(hosted.node)
            hosted.task = self._loop.create_task(self._host(hosted), name=worker)
        for node, keeper in found.keepers.items():
            self._keepers.keep(node, keeper)
        self._launch.on_survivors(found.looks)
        return frozenset({*found.actors, *(KEEPER + node for node in found.keepers)})

    def start(self, inbox: Tell, address: tuple[str, int], key: JobKey) -> None:
        self._inbox, self._address, self._key = inbox, address, key
        self._keepers.serve(address, key)
        if not self._thread.is_alive():
            self._thread.start()
        self._call(self._begin_all)

    def want_workers(self, total: int) -> None:
        self._call(self._set_wanted, total)

    def use_places(self, places: dict[NodeId, int]) -> None:
        self._call(self._set_places, places)

    def avoid_node(self, node: NodeId, for_s: float) -> None:
        self._call(self._avoid, node, for_s)

    def kill_worker(self, worker: WorkerId) -> None:
        self._call(self._kill, worker)

    def kill_keeper(self, node: NodeId) -> None:
        self._call(self._keepers.give_up, node)

    def prepare(self, assignment: Assignment) -> dict[WorkerId, dict[str, Any]]:
        seated = self._seats(assignment)
        return {worker: asdict(seat) for worker, seat in seated.items()}

    def _seats(self, assignment: Assignment) -> dict[WorkerId, WorkerSeat]:
        places = seats([member.node for member in assignment.members])
        reports = self._launch.reports()
        return {
            member.worker: WorkerSeat(assignment.generation, assignment.source.step, place, reports)
            for member, place in zip(assignment.members, places, strict=True)
        }

    def formed(self, assignment: Assignment) -> None:
        members: dict[WorkerId, Worker] = {}
        for member, seat in self._seats(assignment).items():
            hosted = self._hosted.get(member)
            if hosted is not None and hosted.handle is not None:  # lost meanwhile: its turn comes
                hosted.handle.distributed_context = seat.place
                members[member] = hosted.handle
        self._launch.on_formed(assignment, members)

    def close(self, keepers_s: float = 0.0) -> None:
        """Stops keeping workers. Members live on until Ray Train has fetched their last reports."""
        self._keepers.until_s = time.monotonic() + keepers_s
        self._call(self._stop_keeping)
        self._let_keepers_end()

    def _let_keepers_end(self) -> None:
        """They save what they have, for as long as ``close`` gave them."""
        left_s = self._keepers.until_s - time.monotonic()
        if left_s > 0 and self._thread.is_alive():
            ended = asyncio.run_coroutine_threadsafe(self._keepers.await_end(left_s), self._loop)
            with contextlib.suppress(TimeoutError):
                ended.result(2 * left_s)

    def release(self) -> None:
        """Kills what is left and frees every resource. Bounded; idempotent.

        May come while ``close`` still waits, in another thread: keepers have their time.
        """
        if not self._thread.is_alive():
            return
        self._let_keepers_end()
        done = threading.Event()
        self._call(self._free_everything, done)
        done.wait(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def leave(self) -> None:
        self.is_left = True
        if self._thread.is_alive():
            self._call(self._forget_everybody)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)

    def retire(self, worker: WorkerId) -> None:
        """The worker has ended in good order and its last report is fetched."""
        self._call(self._retire, worker)

    # ------------------------------------------------------------------- the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _begin_all(self) -> None:
        self._begun.set()
        self._watch()
        self._clearing = self._loop.create_task(self._clear_left())

    async def _clear_left(self) -> None:
        """What an earlier controller has left that is of no use holds no resources any more."""
        prefix = self._launch.names.prefix
        actors = {self._launch.names.worker(worker) for worker in self._hosted}
        placements = (hosted.placement for hosted in self._hosted.values())
        groups = {placement.id.hex() for placement in placements if placement is not None}
        await ask_gcs(partial(reap, f"{prefix}worker/", actors))
        await ask_gcs(partial(reap, f"{prefix}place/", (), groups))
        self._cleared.set()

    def _set_wanted(self, total: int) -> None:
        self._wanted = total
        self._fill()

    def _fill(self) -> None:
        """Starts workers until ``wanted`` are alive or starting off draining nodes."""
        if self._closed:
            return
        draining = self._nodes.draining
        staying = [hosted for hosted in self._hosted.values() if hosted.node not in draining]
        for hosted in staying[self._wanted :]:
            if hosted.handle is None:  # never those that are placed: they are released, or killed
                self._cancel(hosted)
        for _ in range(self._wanted - len(staying)):
            if (room := self._places.free(self._hosted.values())) is not None:
                self._begin(room)

    def _set_places(self, places: dict[NodeId, int]) -> None:
        self._places.by_node = places
        for hosted in self._places.beyond(self._hosted.values()):
            self._cancel(hosted)
        self._fill()

    def _begin(self, room: NodeId) -> None:
        number = self._launch.owner()
        worker = f"r{number - 1}w{self._count}" if number > 1 else f"w{self._count}"
        self._count += 1  # an id is never used again, whoever has the job
        hosted = self._hosted[worker] = Hosted(worker, destined=room)
        hosted.task = self._loop.create_task(self._host(hosted), name=worker)

    async def _host(self, hosted: Hosted) -> None:
        """The life of one worker."""
        cause = ""
        try:
            await self._begun.wait()
            if hosted.handle is None:
                await self._bring_up(hosted)
            await self._await_called(hosted)
            cause = await self._await_end(hosted)
        except (RayError, TimeoutError) as error:
            cause = why_gone(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a callback of Ray Train's, or the user's: this worker is lost
            log.exception("worker %s could not be started", hosted.worker)
            cause = f"{type(error).__name__}: {error}"
        if cause:
            self._lost(hosted, cause)
        else:
            hosted.ended = True
            self._inbox(WorkerLost(time.time(), hosted.worker, "its train loop has ended"))
            self._launch.on_ended(hosted.worker)

    async def _bring_up(self, hosted: Hosted) -> None:
        await self._cleared.wait()
        others = [other.node for other in self._hosted.values() if other.node]
        avoided = sorted(self._nodes.avoided)
        placed = await self._placements.take(hosted.worker, others, avoided, hosted.destined)
        hosted.placement, hosted.node = placed
        name = self._launch.names.worker(hosted.worker)
        hosted.actor = self._group.create_actor(hosted.placement, name)
        handle = await self._meet(hosted, hosted.actor)
        hosted.node = handle.metadata.node_id
        self._nodes.used.add(hosted.node)
        self._keepers.keep(hosted.node)
        task = Task(
            self._address,
            self._key,
            hosted.worker,
            hosted.node,
            self._launch.train_loop,
            self._launch.domain_labels,
        )
        starting = self._group.start_worker(handle, task, self._launch.controller)
        hosted.handle = handle
        await asyncio.wait_for(starting, EQUIP_TIMEOUT_S)

    async def _meet(self, hosted: Hosted, actor: ActorHandle[Any]) -> Worker:
        """Waits for capacity, however long; but a worker that has its place must come up in time.

        An actor that is asked for just before the GCS is killed never comes, Ray says nothing, and
        no other one comes in its placement group either. Raises TimeoutError.
        """
        meeting = asyncio.ensure_future(self._group.meet(actor))
        try:
            while not hosted.node:
                done, _ = await asyncio.wait([meeting], timeout=PLACED_POLL_S)
                if done:
                    return meeting.result()
                hosted.node = await ask_gcs(partial(node_of, hosted.placement)) or ""
            return await asyncio.wait_for(meeting, self._launch.start_timeout_s)
        except TimeoutError:
            self._placements.give_back(hosted.placement, keep=False)
            hosted.placement, late_s = None, self._launch.start_timeout_s
            raise TimeoutError(f"its process did not come up in {late_s:g} s") from None
        finally:
            meeting.cancel()

    async def _await_called(self, hosted: Hosted) -> None:
        """One whose imports hang, say, would be counted and waited for without end. Raises
        TimeoutError."""
        assert hosted.actor is not None
        late_s = self._launch.start_timeout_s
        if not hasattr(hosted.actor, "await_called"):  # of the release before: it trains
            return
        try:
            await asyncio.wait_for(_answer(hosted.actor.await_called), late_s)
        except TimeoutError:
            self._placements.give_back(hosted.placement, keep=False)  # it may be the node
            hosted.placement = None
            raise TimeoutError(f"it did not call the controller in {late_s:g} s") from None

    async def _await_end(self, hosted: Hosted) -> str:
        assert hosted.actor is not None
        end = await _answer(hosted.actor.await_end)
        if end is None:
            await asyncio.Event().wait()  # another controller asks: this one is to leave
        return str(end)

    def _lost(self, hosted: Hosted, cause: str) -> None:
        asked = hosted.worker not in self._hosted or cause == KILLED
        self._inbox(WorkerLost(time.time(), hosted.worker, cause, asked=asked))
        self._launch.on_lost(hosted.worker)
        self._nodes.look.set()
        self._bury(hosted.worker)
        early = time.monotonic() - hosted.born_s < EARLY_S
        self._failures = self._failures + 1 if early else 0
        self._loop.call_later(RETRY_S[min(self._failures, len(RETRY_S) - 1)], self._fill)

    def _retire(self, worker: WorkerId) -> None:
        self._bury(worker)
        self._fill()

    def _bury(self, worker: WorkerId) -> None:
        """Kills what may be left of a worker; its resources are kept for its replacement.

        Unless one is waiting for resources already, elsewhere or here.
        """
        hosted = self._hosted.pop(worker, None)
        if hosted is None:
            return
        if hosted.actor is not None:
            ray.kill(hosted.actor)
        usable = hosted.node and hosted.node not in {*self._nodes.draining, *self._nodes.avoided}
        waiting = any(other.handle is None for other in self._hosted.values())
        short = len(self._hosted) < self._wanted  # fewer may have been asked for meanwhile
        keep = bool(usable and short and not waiting and not self._closed)
        keep = keep and not self._places.by_node  # else it may be another job's turn
        self._placements.give_back(hosted.placement, keep=keep)

    def _cancel(self, hosted: Hosted) -> None:
        if hosted.task is not None:
            hosted.task.cancel()
        self._hosted.pop(hosted.worker, None)
        if hosted.actor is not None:
            ray.kill(hosted.actor)
        self._placements.give_back(hosted.placement, keep=False)

    def _avoid(self, node: NodeId, for_s: float) -> None:
        """Places that wait for capacity don't know of it: they are asked for anew, now and then."""
        earlier = self._nodes.avoided.get(node)
        self._nodes.avoided[node] = self._loop.call_later(for_s, self._avoid_no_more, node)
        if earlier is None:
            self._place_anew()
        else:
            earlier.cancel()

    def _avoid_no_more(self, node: NodeId) -> None:
        del self._nodes.avoided[node]
        self._place_anew()

    def _place_anew(self) -> None:
        self._placements.clear()  # what is kept may lie there
        for hosted in list(self._hosted.values()):
            if hosted.placement is not None and not hosted.node:
                self._cancel(hosted)
        self._fill()

    def _kill(self, worker: WorkerId) -> None:
        hosted = self._hosted.get(worker)
        if hosted is not None and hosted.actor is not None and not hosted.ended:
            ray.kill(hosted.actor)

    # ------------------------------------------------------------------- the nodes

    def _watch(self) -> None:
        self._watchers = self._nodes.watch(self._drained, self._died)

    def _drained(self, node: NodeId, deadline_s: float, reason: str) -> None:
        if node in self._nodes.used:
            self._inbox(NodeDraining(time.time(), node, deadline_s, reason))
        self._placements.clear()  # what is kept may lie on that node
        self._fill()

    def _died(self, node: NodeId, why: str) -> None:
        self._inbox(NodeLost(time.time(), node, why))

    # ---------------------------------------------------------------------- the end

    def _stop_keeping(self) -> None:
        self._closed = True
        self._keepers.close()
        self._wanted = 0
        for hosted in list(self._hosted.values()):
            if hosted.worker not in self._group.members:
                self._cancel(hosted)
        self._placements.clear()

    def _forget_everybody(self) -> None:
        self._closed = True
        self._keepers.close()
        for hosted in self._hosted.values():
            if hosted.task is not None:
                hosted.task.cancel()
        self._hosted.clear()
        for watcher in self._watchers:
            watcher.cancel()
        self._keepers.leave()

    def _free_everything(self, done: threading.Event) -> None:
        self._stop_keeping()
        for hosted in list(self._hosted.values()):
            self._cancel(hosted)
        for watcher in self._watchers:
            watcher.cancel()
        self._keepers.kill()
        done.set()


async def _answer(method: Any) -> Any:
    """Of a call that ends with what it waits for, or with its actor."""
    while True:
        try:
            return await method.remote()
        except ActorUnavailableError:  # means "maybe": ask again
            await asyncio.sleep(ASK_AGAIN_S)
