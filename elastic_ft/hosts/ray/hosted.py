"""What ``ray_host`` knows of one worker, and of the run that it hosts. Data alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from elastic_ft.core.assignment import Assignment, NodeId, WorkerId
from elastic_ft.hosts.ray.names import RunNames
from elastic_ft.hosts.ray.placement_groups import Placements
from elastic_ft.hosts.ray.ray_private import Worker
from elastic_ft.hosts.ray.worker_actor import WorkerLook


@dataclass(slots=True, eq=False)
class Hosted:
    """One worker, from its placement group to its end."""

    worker: WorkerId
    placement: PlacementGroup | None = None
    actor: ActorHandle[Any] | None = None
    handle: Worker | None = None  # Ray Train's, once it is placed
    node: NodeId = ""
    task: asyncio.Task[None] | None = None
    born_s: float = field(default_factory=time.monotonic)
    destined: NodeId = ""  # where it is to be; "": anywhere
    ended: bool = False  # its training thread has, in good order: its last report is awaited


@dataclass(slots=True)
class Launch:
    """What ``RayHost`` needs of the controller actor that it lives in.

    Attributes:
        names: of all that this run has on the cluster.
        train_loop: as ``Task``'s.
        owner: number of the controller among all that the job has had; known once it has begun.
        start_timeout_s: from a worker's place to its process, and from there to its call.
        executable: that Ray starts keepers with; "": Python.
    """

    names: RunNames
    owner: Callable[[], int]
    placements: Placements
    train_loop: bytes | None
    controller: ActorHandle[Any]
    on_formed: Callable[[Assignment, dict[WorkerId, Worker]], None]
    on_lost: Callable[[WorkerId], None]
    on_ended: Callable[[WorkerId], None]
    on_survivors: Callable[[dict[WorkerId, WorkerLook]], None]
    reports: Callable[[], int]  # rounds of ray.train.report so far
    domain_labels: tuple[str, ...]
    start_timeout_s: float
    executable: str = ""
