"""The nodes that host a job's workers, or did: which of them drain, and which are dead.

Only the GCS knows, and it may be away. Nobody waits for this: a worker's death is heard from its
connection, and from the call that it never answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.ray.ray_private import draining_nodes

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.5  # notices come seconds before their deadline, and each look takes some ms
NODE_POLL_S = 1.0
DRAIN_DEADLINE_S = 120.0  # where the notice gives none


async def ask_gcs(question: Callable[[], Any]) -> Any:
    """Off the loop: while the head is away it blocks. None if it failed."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, question)
    except Exception as error:  # the head comes back, or the job ends by its own deadlines
        log.warning("no answer from the GCS: %s: %s", type(error).__name__, error)
        return None


@dataclass(slots=True)
class ClusterNodes:
    """Of an event loop.

    Attributes:
        look: set: who is dead is asked at once.
    """

    used: set[NodeId] = field(default_factory=set)
    draining: dict[NodeId, float] = field(default_factory=dict)  # until when (unix)
    # Nobody is placed there for now; what ends that.
    avoided: dict[NodeId, asyncio.TimerHandle] = field(default_factory=dict)
    lost: set[NodeId] = field(default_factory=set)
    look: asyncio.Event = field(default_factory=asyncio.Event)

    def watch(
        self,
        on_drain: Callable[[NodeId, float, str], None],
        on_death: Callable[[NodeId, str], None],
    ) -> list[asyncio.Task[None]]:
        """Until they are cancelled. ``on_drain``: with its deadline (unix) and why."""
        loop = asyncio.get_running_loop()
        return [
            loop.create_task(self._watch_drains(on_drain)),
            loop.create_task(self._watch_deaths(on_death)),
        ]

    async def _watch_drains(self, on_drain: Callable[[NodeId, float, str], None]) -> None:
        while True:
            draining = await ask_gcs(draining_nodes)
            for node, until_s in (draining or {}).items():
                if node not in self.draining:
                    deadline_s = until_s or time.time() + DRAIN_DEADLINE_S
                    self.draining[node] = deadline_s
                    unknown = "" if until_s else ", and names no deadline"
                    on_drain(node, deadline_s, f"Ray drains the node{unknown}")
            await asyncio.sleep(DRAIN_POLL_S)

    async def _watch_deaths(self, on_death: Callable[[NodeId, str], None]) -> None:
        """Looks every second, and at once when a worker has died."""
        while True:
            for node in await ask_gcs(ray.nodes) or ():
                name = node["NodeID"]
                if not node["Alive"] and name in self.used - self.lost:
                    self.lost.add(name)
                    told = node.get("DeathReasonMessage") or "Ray declared it dead"
                    why = " ".join(told.split())
                    on_death(name, "it was drained" if name in self.draining else why)
            self.look.clear()
            try:
                await asyncio.wait_for(self.look.wait(), NODE_POLL_S)
            except TimeoutError:
                continue
