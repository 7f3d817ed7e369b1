"""``elastic.standby``: where a job's controller may run next, its imports are made already.

Ray starts a controller again within a moment; 5 to 10 s of importing come after it, in which a
worker that is lost waits. So on two nodes there is a template of the job's own (``warm_nodes``),
from which it is forked: its own node, and the one where it is next should that die. They are
detached. The controller replaces one that has gone with its node, and ends them with the job.

A template takes nothing over by itself: who is in charge next is Ray's to start, cold or forked,
and the store's to let write (``storage.owners``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.ray.cluster_nodes import ask_gcs
from elastic_ft.hosts.ray.controller_place import HEAD, LABEL, ControllerPlaces
from elastic_ft.hosts.ray.names import NAMESPACE, actors_of, reap
from elastic_ft.hosts.ray.warm_nodes import Template, executable_here

log = logging.getLogger(__name__)
NODES = 2
ORDERED_MAX = 8  # nodes, of which the controller's is the first that lives
LOOK_EVERY_S = 5.0
EARLY_S = 60.0
RETRY_S = (0.0, 10.0, 30.0, 120.0, 300.0)  # after so many that have ended early on one node
END_TIMEOUT_S = 10.0
OF_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Standby:
    """Of one run.

    Attributes:
        prefix: of its actors' names.
        order: nodes, the first of which that lives has the controller.
        variables: the controller's environment; what is forked has read the template's.
    is_tied: the controller is on no other node.
    """

    prefix: str
    order: Sequence[NodeId]
    variables: dict[str, str]
    is_tied: bool

    def look(self) -> tuple[set[NodeId], list[NodeId]]:
        """Where there are templates, and where there should be. Blocks while the GCS is away."""
        names = [name.removeprefix(self._root) for name in actors_of(self._root)]
        have = {name.partition("/")[0] for name in names}
        nodes = [n for n in ray.nodes() if not self.is_tied or n["NodeID"] in self.order]
        own = ray.get_runtime_context().get_node_id()
        return have, standby_nodes(own, self.order, nodes)

    @property
    def _root(self) -> str:
        return standby_root(self.prefix)

    def make(self, node: NodeId) -> None:
        """For the controller's process alone, which ends them with the job."""
        log.info("node %.12s is made ready for the next controller", node)
        ray.remote(
            num_cpus=0,
            max_restarts=-1,
            lifetime="detached",
            name=f"{self._root}{node}/{uuid.uuid4().hex[:8]}",  # an earlier one may not be gone yet
            namespace=NAMESPACE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": self.variables},
        )(Template).remote(node, whose(self.prefix))

    def end(self) -> None:
        """Blocks while the GCS is away."""
        end_standbys(self.prefix)


@dataclass(frozen=True, slots=True)
class MadeStandby:
    """On one node: how many times in a row, and when last."""

    times: int
    at_s: float


class Standbys(threading.Thread):
    """Of the controller's process: sees to it that there are as many as there should be."""

    def __init__(self, standby: Standby) -> None:
        super().__init__(name="standbys", daemon=True)
        self._standby, self._over = standby, threading.Event()
        self._made: dict[NodeId, MadeStandby] = {}

    def run(self) -> None:
        while True:
            try:
                self.look(time.monotonic())
            except Exception as error:  # the head comes back; until then a controller starts cold
                log.warning("no standby is looked after: %s: %s", type(error).__name__, error)
            if self._over.wait(LOOK_EVERY_S):
                return

    def look(self, now_s: float) -> None:
        """Makes those that are missing; after growing pauses where they end early."""
        have, nodes = self._standby.look()
        for node in have & self._made.keys():
            if now_s - self._made[node].at_s > EARLY_S:
                del self._made[node]
        for node in nodes:
            made = self._made.get(node, MadeStandby(0, -math.inf))
            if self._over.is_set():  # they are ended by now, perhaps
                return
            if node in have or now_s - made.at_s < RETRY_S[min(made.times, len(RETRY_S) - 1)]:
                continue
            self._made[node] = MadeStandby(made.times + 1, now_s)
            self._standby.make(node)

    def close(self) -> None:
        """They stay: another controller has the job."""
        self._over.set()

    async def end(self) -> None:
        """Bounded: while the GCS is away they stay, for the next start on that cluster to end."""
        self.close()
        try:
            await asyncio.wait_for(ask_gcs(self._end_all), END_TIMEOUT_S)
        except TimeoutError:
            prefix = self._standby.prefix
            log.warning("the GCS does not answer: %sstandby/... stays; elastic-ft gc", prefix)

    def _end_all(self) -> None:
        self.join(END_TIMEOUT_S / 2)  # its look may be held up: it makes none after that
        self._standby.end()


def standby_root(prefix: str) -> str:
    """Of the templates' names."""
    return f"{prefix}standby/"


def end_standbys(prefix: str) -> None:
    """Of the run with that prefix. Blocks while the GCS is away."""
    reap(standby_root(prefix))


def whose(prefix: str) -> str:
    """``Template``'s ``of``."""
    return hashlib.sha256(prefix.encode()).hexdigest()[:OF_DIGITS]


def standby_executable(prefix: str) -> str:
    """What Ray is to start in place of Python for the controller of the run with that prefix."""
    return executable_here(whose(prefix))


def standby_of(prefix: str, places: ControllerPlaces, variables: dict[str, str]) -> Standby:
    return Standby(prefix, places.likely[:ORDERED_MAX], variables, len(places.selectors) == 1)


def standby_nodes(
    own: NodeId, order: Sequence[NodeId], nodes: Collection[dict[str, Any]]
) -> list[NodeId]:
    """Its ``own``, where the controller is, and where it is next, should that node die; not on the
    head unless there is nothing else. Once ``order`` is used up that is Ray's choice, and this but
    a guess, the same each time. ``nodes``: as ``ray.nodes()`` has them."""
    rank = {node: place for place, node in enumerate(order)}

    def place(node: dict[str, Any]) -> tuple[bool, int, bool, bool, str]:
        name, labels = node["NodeID"], node.get("Labels", {})
        of_order = rank.get(name, len(rank))
        return name != own, of_order, labels.get(LABEL) != "true", HEAD in node["Resources"], name

    living = sorted((node for node in nodes if node["Alive"]), key=place)
    return [str(node["NodeID"]) for node in living[:NODES]]
