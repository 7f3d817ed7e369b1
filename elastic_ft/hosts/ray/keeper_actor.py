"""The node keeper on Ray: one actor per node that hosts a worker.

Ray ends an actor with the one that made it, but for detached ones: a keeper still has to save what
it has when its controller is killed. So it is detached, and ends itself.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.core.events import NodeId
from elastic_ft.transport.tls import JobKey


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
