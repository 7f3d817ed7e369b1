"""The node keeper on Ray: one actor per node that hosts a worker.

Ray ends an actor with the one that made it, but for detached ones: a keeper still has to save what
it has when its controller is killed. So it is detached, and ends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.keeper_lives import KeeperLives
from elastic_ft.hosts.ray.causes import why_gone
from elastic_ft.hosts.ray.names import NAMESPACE, RunNames
from elastic_ft.hosts.ray.notices import Metadata, NoticeWatch, cloud_here
from elastic_ft.hosts.ray.ray_private import drain_node
from elastic_ft.hosts.ray.started_by import environment_by
from elastic_ft.hosts.ray.stopped import StoppedControllers, end_controller
from elastic_ft.keeper.preemption import PreemptionNotice
from elastic_ft.transport.tls import JobKey

log = logging.getLogger(__name__)
ASK_AGAIN_S = 0.2
RESTART_S = 1.0  # the node itself may be gone: that is known by then


@ray.remote(num_cpus=0)
class KeeperActor:
    """Starts keeping as it is created. ``RayHost`` starts another one where it has ended."""

    def __init__(
        self, controller: tuple[str, int], key: JobKey, node: NodeId, run_url: str
    ) -> None:
        from elastic_ft.keeper.node_keeper import NodeKeeper

        keeper = NodeKeeper(controller, key, node, ray.util.get_node_ip_address())
        itself = ray.get_runtime_context().current_actor
        end = functools.partial(end_controller, run_url)
        watch = StoppedControllers(run_url, keeper.timeout_s, lambda: keeper.silent_s, end)
        watch.start()
        if (cloud := cloud_here(keeper.notices)) is not None:
            NoticeWatch(Metadata(cloud), functools.partial(drain_for, node)).start()

        def serve() -> None:
            try:
                keeper.serve()
            finally:
                ray.kill(itself)

        threading.Thread(target=serve, name="keeper", daemon=True).start()

    def await_end(self) -> None:
        """Never returns: who called it learns of this process's end."""
        threading.Event().wait()


def drain_for(node: NodeId, notice: PreemptionNotice) -> None:
    """Tells Ray, which tells every job's controller. Raises RuntimeError where it refuses."""
    address = ray.get_runtime_context().gcs_address
    drain_node(address, node, "preemption", notice.deadline_s)


def start_keeper(
    names: RunNames, controller: tuple[str, int], key: JobKey, node: NodeId, executable: str = ""
) -> ActorHandle[Any]:
    """Returns at once; the keeper reports to the controller when it is up."""
    name = names.keeper(node)
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    actor: ActorHandle[Any] = KeeperActor.options(  # type: ignore[attr-defined]
        scheduling_strategy=here,
        lifetime="detached",
        name=name,
        namespace=NAMESPACE,
        runtime_env=environment_by(executable, {}),
    ).remote(controller, key, node, names.run_url)
    return actor


@dataclass(slots=True, eq=False)
class KeeperLife:
    """One life of a node's keeper. ``given_up``: it hangs, and is not waited for."""

    actor: ActorHandle[Any]
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class Keepers:
    """A keeper on each node that hosts a worker, and another where one has ended: an empty one, but
    whole. Of the host's event loop.

    Args:
        names: of the run.
        lost: nodes; grows.
        executable: that Ray starts them with; "": Python.

    Attributes:
        until_s: on the monotonic clock, for how long they may save what they have.
    """

    def __init__(self, names: RunNames, lost: Set[NodeId], executable: str = "") -> None:
        self._names, self._lost, self._executable = names, lost, executable
        self._address: tuple[str, int] = ("", 0)
        self._key = JobKey(b"")
        self._lives: dict[NodeId, KeeperLife] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()
        self.until_s = 0.0

    def serve(self, address: tuple[str, int], key: JobKey) -> None:
        """The controller's."""
        self._address, self._key = address, key

    def close(self) -> None:
        """No other is started from now on."""
        self._closed.set()

    def keep(self, node: NodeId, survivor: ActorHandle[Any] | None = None) -> None:
        """From now on there is one: ``survivor``, of an earlier controller, or a new one."""
        if node not in self._tasks:
            self._tasks[node] = asyncio.get_running_loop().create_task(self._keep(node, survivor))

    async def _keep(self, node: NodeId, actor: ActorHandle[Any] | None) -> None:
        lives = KeeperLives()
        while not self._closed.is_set() and node not in self._lost:
            lives.begin()
            if actor is None:
                actor = start_keeper(self._names, self._address, self._key, node, self._executable)
            life, actor = KeeperLife(actor), None
            self._lives[node] = life
            ended = asyncio.ensure_future(_await_end(life.actor))
            given_up = asyncio.ensure_future(life.given_up.wait())
            await asyncio.wait((ended, given_up), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            given_up.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RESTART_S + lives.end())

    def give_up(self, node: NodeId) -> None:
        """Ray may not be able to end a process that is stopped: it is one of ours no more."""
        if (life := self._lives.get(node)) is not None:
            ray.kill(life.actor)
            life.given_up.set()

    async def await_end(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

    def leave(self) -> None:
        """They are another controller's."""
        for task in self._tasks.values():
            task.cancel()
        self._lives.clear()

    def kill(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for life in self._lives.values():
            ray.kill(life.actor)


async def _await_end(actor: ActorHandle[Any]) -> None:
    while True:
        try:
            await actor.await_end.remote()
        except ActorUnavailableError:  # means "maybe": ask again
            await asyncio.sleep(ASK_AGAIN_S)
        except RayError as error:
            log.info("a keeper has ended: %s", why_gone(error))
            return
