"""``elastic.standby``: where a job's controller may run next, its imports are made already.

Ray starts a controller again within a moment; 5 to 10 s of importing come after it, in which a
worker that is lost waits. So on two of the nodes where it may run there is a template of the job's
own (``warm_nodes``), from which it is forked. They are detached, and end with the job.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.ray.cluster_nodes import ask_gcs
from elastic_ft.hosts.ray.controller_place import ControllerPlaces
from elastic_ft.hosts.ray.names import NAMESPACE, reap
from elastic_ft.hosts.ray.warm_nodes import Template, executable_here

log = logging.getLogger(__name__)
NODES = 2
OF_DIGITS = 12
END_TIMEOUT_S = 10.0


def _of(prefix: str) -> str:
    return hashlib.sha256(prefix.encode()).hexdigest()[:OF_DIGITS]


def standby_executable(prefix: str) -> str:
    """What Ray is to start in place of Python for the controller of the run with that prefix."""
    return executable_here(_of(prefix))


def start_standby(
    prefix: str, places: ControllerPlaces, environment: dict[str, Any]
) -> ControllerPlaces:
    """Returns where the controller is to be. ``environment``: the controller's runtime environment;
    what is forked has read the template's. Returns at once."""
    places = places.likeliest(NODES)
    for node in places.likely:
        _template(prefix, node, {"env_vars": environment["env_vars"]})
    return places


def _template(prefix: str, node: NodeId, environment: dict[str, Any]) -> None:
    ray.remote(
        num_cpus=0,
        max_restarts=-1,
        lifetime="detached",
        name=f"{prefix}standby/{node}/{uuid.uuid4().hex[:8]}",  # an earlier one may not be gone yet
        namespace=NAMESPACE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env=environment,
    )(Template).remote(node, _of(prefix))


async def end_standby(prefix: str) -> None:
    """Bounded: while the GCS is away they stay, for the next start on that cluster to end."""
    try:
        await asyncio.wait_for(ask_gcs(partial(reap, f"{prefix}standby/")), END_TIMEOUT_S)
    except TimeoutError:
        log.warning("the GCS does not answer: %sstandby/... stays; elastic-ft gc ends it", prefix)
