"""Who is left of a run whose controller is gone: its workers and keepers, asked by name.

They are detached, and train on. Ray knows their names; each worker knows the rest (``WorkerLook``).
Who does not answer soon is not adopted: it is stopped, or has not yet come up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.hosts.ray.causes import why_gone
from elastic_ft.hosts.ray.names import RunNames, actor_named, actors_of
from elastic_ft.hosts.ray.worker_actor import WorkerLook

log = logging.getLogger(__name__)
LIST_TIMEOUT_S = 60.0  # for the GCS to be there: it has just started this process
LIST_AGAIN_S = 0.5
LOOK_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Survivors:
    """Attributes:
    looks: of the workers that train, or wait to.
    """

    actors: dict[WorkerId, ActorHandle[Any]] = field(default_factory=dict)
    looks: dict[WorkerId, WorkerLook] = field(default_factory=dict)
    keepers: dict[NodeId, ActorHandle[Any]] = field(default_factory=dict)


async def find_survivors(names: RunNames) -> Survivors:
    """Bounded. Of a first controller: nobody."""
    found = Survivors()
    handles = await _handles(names)
    for name, actor in handles.items():
        kind, _, rest = name.removeprefix(names.prefix).partition("/")
        if kind == "keeper":
            found.keepers[rest.partition("/")[0]] = actor
    workers = {
        name.removeprefix(names.worker("")): actor
        for name, actor in handles.items()
        if name.startswith(names.worker(""))
    }
    looks = await asyncio.gather(*(_look(worker, actor) for worker, actor in workers.items()))
    for (worker, actor), look in zip(workers.items(), looks, strict=True):
        if look is not None:
            found.actors[worker], found.looks[worker] = actor, look
    return found


async def _handles(names: RunNames) -> dict[str, ActorHandle[Any]]:
    """Off the event loop: these calls block while the GCS is away."""

    def ask() -> dict[str, ActorHandle[Any]]:
        found = {name: actor_named(name) for name in actors_of(names.prefix)}
        return {name: actor for name, actor in found.items() if actor is not None}

    until_s, loop = time.monotonic() + LIST_TIMEOUT_S, asyncio.get_running_loop()
    while True:
        left_s = until_s - time.monotonic()
        try:
            return await asyncio.wait_for(loop.run_in_executor(None, ask), max(left_s, 0.1))
        except (RayError, OSError, RuntimeError, TimeoutError) as error:
            if time.monotonic() + LIST_AGAIN_S > until_s:
                log.warning("who survived is not known: %s", error)
                return {}
            log.info("who survived is asked again: %s", error)
        await asyncio.sleep(LIST_AGAIN_S)


async def _look(worker: WorkerId, actor: ActorHandle[Any]) -> WorkerLook | None:
    try:
        look: WorkerLook | None = await asyncio.wait_for(actor.look.remote(), LOOK_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        log.warning("worker %s is not adopted: %s", worker, why_gone(error))
        return None
    return look
