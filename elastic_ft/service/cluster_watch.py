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
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from elastic_ft.hosts.ray.names import ROOT, actors_of, check_connected, run_of

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
    kind: what a slot is: CPU or GPU; "": nobody has looked yet.
    """

    asked_s: float = 0.0
    nodes: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    held: dict[str, Counter[str]] = field(default_factory=dict)
    led: frozenset[str] = frozenset()
    kind: str = ""


class ClusterWatch:
    """Attributes:
    sight: the newest.
    """

    def __init__(
        self, on_sight: Callable[[Sight], object], look: Callable[[], Sight] | None = None
    ) -> None:
        self.sight = Sight()
        self._on_sight, self._look = on_sight, look or (lambda: look_at_ray(self.sight.kind))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                self.sight = self._look()
            except Exception as error:  # the head is away, and comes back
                log.warning("the cluster does not answer: %s: %s", type(error).__name__, error)
            else:
                self._on_sight(self.sight)
            self._ended.wait(EVERY_S)


def slots_by_node(alive: list[dict[str, Any]], kind: str) -> tuple[str, dict[str, int]]:
    """What a slot is, and how many each has, of nodes as Ray tells of them. ``kind``: what it was:
    a GPU stays one when the last node that has any is gone."""
    has_gpus = any(node["Resources"].get("GPU") for node in alive)
    kind = "GPU" if has_gpus or kind == "GPU" else "CPU"
    slots = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in alive}
    return kind, {node: count for node, count in slots.items() if count > 0}


def look_at_ray(kind: str) -> Sight:
    """``kind``: as ``slots_by_node``'s. Blocks while the GCS is away."""
    asked_s = time.monotonic()
    check_connected()
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind, slots = slots_by_node(alive, kind)
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
        slots,
        {node["NodeID"]: node["NodeManagerHostname"] for node in alive},
        held,
        frozenset(led),
        kind,
    )
