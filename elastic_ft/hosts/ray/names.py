"""What a job leaves on a cluster, and what it is called there.

Controllers, keepers, workers and their placement groups are detached: no driver owns them, so the
end of none ends them. All that belongs to one run folder has one prefix, in one namespace::

    elastic_ft/<job>/<run>/controller
    elastic_ft/<job>/<run>/keeper/<node>/<draw>
    elastic_ft/<job>/<run>/worker/<worker>
    elastic_ft/<job>/<run>/standby/<node>/<draw>

A name is unique in its namespace: two controllers of a run can't be created. (That alone is no
fence: who may write is known to the store, ``storage.owners``.)
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RaySystemError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.hosts.ray.ray_private import PlacementGroupID, actors_on

NAMESPACE = "elastic_ft"
ROOT = "elastic_ft/"
RUN_DIGITS = 12
KEEPER_MARK, WORKER_MARK = "/keeper/", "/worker/"
ASK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class RunNames:
    """Names of what belongs to the run folder ``run_url`` of ``job``."""

    job: str
    run_url: str

    @property
    def prefix(self) -> str:
        """The same for every driver and controller of this run folder."""
        run = hashlib.sha256(self.run_url.encode()).hexdigest()[:RUN_DIGITS]
        return f"{ROOT}{re.sub(r'[^A-Za-z0-9._-]', '_', self.job)}/{run}/"

    @property
    def controller(self) -> str:
        return f"{self.prefix}controller"

    def worker(self, worker: WorkerId) -> str:
        return f"{self.prefix}{WORKER_MARK[1:]}{worker}"

    def keeper(self, node: NodeId) -> str:
        """New each time: the one before it may not be gone yet."""
        return f"{self.prefix}keeper/{node}/{uuid.uuid4().hex[:8]}"


def check_connected() -> None:
    """Raises RaySystemError in a process that is on no cluster. At most other calls Ray starts one
    for it, or joins whichever it finds on this machine, and ends the process a minute after that is
    gone."""
    if not ray.is_initialized():
        raise RaySystemError("this process is on no Ray cluster")


def actors_of(prefix: str) -> list[str]:
    """Names of the live actors that begin so. Blocks while the GCS is away."""
    check_connected()
    found = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(prefix))


def workers_on(node: NodeId) -> int:
    """How many workers of jobs are on a node. Blocks while the GCS is away."""
    check_connected()
    return sum(name.startswith(ROOT) and WORKER_MARK in name for name in actors_on(node))


def groups_of(prefix: str) -> dict[str, str]:
    """Ids of the placement groups whose names begin so. Blocks while the GCS is away."""
    check_connected()
    held = {
        entry["name"]: entry["placement_group_id"]
        for entry in placement_group_table().values()
        if entry["state"] != "REMOVED"
    }
    return {name: held[name] for name in sorted(held) if name.startswith(prefix)}


def run_of(name: str) -> str:
    """The prefix of the run that what is called so belongs to."""
    return "/".join(name.split("/")[:3]) + "/"


@dataclass
class Remains:
    """Of a run without a controller. Attributes: actors: their names. groups: name -> id."""

    actors: list[str] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)


def abandoned() -> dict[str, Remains]:
    """Of each run without a controller, alive or to be restarted: what it has left on the cluster.

    Blocks while the GCS is away.
    """
    groups = groups_of(ROOT)  # first: whoever has begun since then is seen to have a controller
    actors = actors_of(ROOT)
    led = {run_of(name) for name in actors if name == f"{run_of(name)}controller"}
    left: dict[str, Remains] = {}
    for name in actors:
        if run_of(name) not in led and KEEPER_MARK not in name:
            left.setdefault(run_of(name), Remains()).actors.append(name)
    for name, group in groups.items():
        if run_of(name) not in led:
            left.setdefault(run_of(name), Remains()).groups[name] = group
    return left


def unanswered(timeout_s: float) -> list[str]:
    """The runs whose controller does not say a word within ``timeout_s``: Ray has no node for it,
    or it stands still. Blocks while the GCS is away."""
    until_s = time.monotonic() + timeout_s
    controllers = {run_of(name): name for name in actors_of(ROOT) if name.endswith("/controller")}
    found = {run: actor_named(name) for run, name in controllers.items()}
    actors: dict[str, Any] = {run: actor for run, actor in found.items() if actor is not None}
    asked = {actor.process.remote(): run for run, actor in actors.items()}
    silent: list[str] = []
    while asked and (left_s := until_s - time.monotonic()) > 0:
        ended, _ = ray.wait(list(asked), num_returns=len(asked), timeout=min(left_s, ASK_AGAIN_S))
        for answer in ended:
            run = asked.pop(answer)
            try:
                ray.get(answer)
            except ActorUnavailableError:  # at once, of one that Ray restarts: it is no answer yet
                asked[actors[run].process.remote()] = run
            except RayError:
                silent.append(run)
        if ended and asked:
            time.sleep(ASK_AGAIN_S)
    return sorted([*silent, *asked.values()])


def clear_away(run: str, remains: Remains) -> bool:
    """Ends and frees ``remains`` of the prefix ``run``, and nothing else of it. False, and nothing
    is done, where a controller has come since. Blocks while the GCS is away."""
    actors = [actor_named(name) for name in remains.actors]  # a later one may have the same name
    if actor_named(f"{run}controller") is not None:
        return False
    for actor in actors:
        if actor is not None:
            ray.kill(actor)
    for group in remains.groups.values():
        free_group(group)
    return True


def actor_named(name: str) -> ActorHandle[object] | None:
    """None if there is none. Blocks while the GCS is away."""
    check_connected()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end_actor(name: str) -> None:
    """For good: Ray does not restart it. Blocks while the GCS is away."""
    if (actor := actor_named(name)) is not None:
        ray.kill(actor)


def free_group(group: str) -> None:
    """By its id: its name is known in the namespace of the driver that made it alone. Blocks while
    the GCS is away."""
    check_connected()
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def reap(
    prefix: str, actors: Collection[str] = (), groups: Collection[str] = ()
) -> tuple[str, ...]:
    """Ends all actors and frees all placement groups of ``prefix``, but those ``actors`` (names)
    and ``groups`` (ids). Returns their names. Blocks while the GCS is away.

    Keepers are left alone: without a controller they save what they have, and end by themselves.
    """
    ended = [n for n in actors_of(prefix) if n not in actors and KEEPER_MARK not in n]
    freed = {name: group for name, group in groups_of(prefix).items() if group not in groups}
    for name in ended:
        end_actor(name)
    for group in freed.values():
        free_group(group)
    return (*ended, *freed)
