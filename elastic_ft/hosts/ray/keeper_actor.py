"""The node keeper on Ray: one actor per node that hosts a worker.

Ray ends an actor with the one that made it, but for detached ones: a keeper still has to save what
it has when its controller is killed. So it is detached, and ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.core.events import NodeId
from elastic_ft.hosts.ray.causes import describe
from elastic_ft.transport.tls import JobKey

log = logging.getLogger(__name__)
STARTS_MAX = 4  # on one node
ASK_AGAIN_S = 0.2
RESTART_S = 1.0  # the node itself may be gone: that is known by then


@ray.remote(num_cpus=0)
class KeeperActor:
    """Starts keeping as it is created. ``RayHost`` starts another one where it has ended."""

    def __init__(self, controller: tuple[str, int], key: JobKey, node: NodeId) -> None:
        from elastic_ft.keeper.keeper import NodeKeeper

        keeper = NodeKeeper(controller, key, node, ray.util.get_node_ip_address())
        itself = ray.get_runtime_context().current_actor

        def serve() -> None:
            try:
                keeper.serve()
            finally:
                ray.kill(itself)

        threading.Thread(target=serve, name="keeper", daemon=True).start()

    def await_end(self) -> None:
        """Never returns: who called it learns of this process's end."""
        threading.Event().wait()


def start_keeper(controller: tuple[str, int], key: JobKey, node: NodeId) -> ActorHandle[Any]:
    """Returns at once; the keeper reports to the controller when it is up."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    actor: ActorHandle[Any] = KeeperActor.options(  # type: ignore[attr-defined]
        scheduling_strategy=here, lifetime="detached", name=f"elastic_ft-keeper-{uuid.uuid4().hex}"
    ).remote(controller, key, node)
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
        lost: nodes; grows.

    Attributes:
        closed: no other is started.
        until_s: on the monotonic clock, for how long they may save what they have.
    """

    def __init__(self, lost: Set[NodeId]) -> None:
        self._lost = lost
        self._address: tuple[str, int] = ("", 0)
        self._key = JobKey(b"")
        self._lives: dict[NodeId, KeeperLife] = {}
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self.closed = False
        self.until_s = 0.0

    def serve(self, address: tuple[str, int], key: JobKey) -> None:
        """The controller's."""
        self._address, self._key = address, key

    def keep(self, node: NodeId) -> None:
        """From now on there is one."""
        if node not in self._tasks:
            self._tasks[node] = asyncio.get_running_loop().create_task(self._keep(node))

    async def _keep(self, node: NodeId) -> None:
        for _ in range(STARTS_MAX):
            if self.closed or node in self._lost:
                break
            life = self._lives[node] = KeeperLife(start_keeper(self._address, self._key, node))
            ended = asyncio.ensure_future(_await_end(life.actor))
            given_up = asyncio.ensure_future(life.given_up.wait())
            await asyncio.wait((ended, given_up), return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            given_up.cancel()
            await asyncio.sleep(RESTART_S)

    def give_up(self, node: NodeId) -> None:
        """Ray may not be able to end a process that is stopped: it is one of ours no more."""
        if (life := self._lives.get(node)) is not None:
            ray.kill(life.actor)
            life.given_up.set()

    async def await_end(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

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
            log.info("a keeper has ended: %s", describe(error))
            return
