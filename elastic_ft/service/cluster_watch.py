"""What the cluster says of itself: nodes, who has places on them, which controllers there are.

Asked in a thread of its own: while the head is away these calls block, and nobody waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import placement_group_table

from elastic_ft.hosts.ray.names import ROOT, actors_of, run_of

log = logging.getLogger(__name__)
EVERY_S = 0.3
PLACE_MARK = "/place/"


@dataclass(frozen=True, slots=True)
class Sight:
    """Attributes:
    asked_s: when it was asked for (monotonic): what was done before that is seen.
    nodes: slots by node: its GPUs where the cluster has any, else its CPUs.
    hosts: machine by node.
    held: by run prefix, workers' places by node; "" for one that waits for a node.
    led: prefixes of runs whose controller lives, or is being restarted.
    kind: what a slot is: CPU or GPU.
    """

    asked_s: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    held: dict[str, Counter[str]] = field(default_factory=dict)
    led: frozenset[str] = frozenset()
    kind: str = "CPU"


class ClusterWatch:
    """Attributes:
    sight: the newest.
    """

    def __init__(
        self, on_sight: Callable[[Sight], object], look: Callable[[], Sight] | None = None
    ) -> None:
        self.sight = Sight()
        self._on_sight, self._look = on_sight, look or look_at_ray
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                self.sight = self._look()
            except Exception as error:  # the head is away, and comes back
                log.warning("the cluster does not answer: %s: %s", type(error).__name__, error)
                continue
            self._on_sight(self.sight)


def look_at_ray() -> Sight:
    """Blocks while the GCS is away."""
    asked_s = time.monotonic()
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
    slots = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in alive}
    led = {run_of(name) for name in actors_of(ROOT) if name == f"{run_of(name)}controller"}
    held: dict[str, Counter[str]] = {}
    for entry in placement_group_table().values():
        if entry["state"] == "REMOVED" or not entry["name"].startswith(ROOT):
            continue
        if PLACE_MARK in entry["name"]:
            placed = entry["state"] == "CREATED"
            node = str(entry["bundles_to_node_id"][0]) if placed else ""
            held.setdefault(run_of(entry["name"]), Counter())[node] += 1
    return Sight(
        asked_s,
        {node: count for node, count in slots.items() if count > 0},
        {node["NodeID"]: node["NodeManagerHostname"] for node in alive},
        held,
        frozenset(led),
        kind,
    )
