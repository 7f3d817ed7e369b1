"""On which node a job's controller may run.

Not on the head where it can be helped: whoever loses that would lose both. Nodes that carry the
label ``elastic-ft/controller=true`` come first; any node but the head next; the head last. A run
folder that lies on this machine alone, though, ties it to this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_ft.core.assignment import NodeId
from elastic_ft.errors import StoreFailed
from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY
from elastic_ft.storage.mounts import plain_path
from elastic_ft.storage.store import open_store

log = logging.getLogger(__name__)
LABEL = "elastic-ft/controller"
HEAD = "node:__internal_head__"  # a resource of the head alone
LOOK_TIMEOUT_S = 30.0
Selector = dict[str, str]
# Else what is started from within a placement group (a trial of Ray Tune's) is put into it, and
# killed with it, never to start again.
ANYWHERE = "DEFAULT"


@dataclass(frozen=True, slots=True)
class ControllerPlaces:
    """Attributes:
    selectors: of nodes, the ones that are wished most first.
    likely: nodes that are there now and have what is wished most.
    """

    selectors: list[Selector]
    likely: list[NodeId]

    @property
    def options(self) -> dict[str, Any]:
        first, *others = self.selectors
        options: dict[str, Any] = {"label_selector": first, "scheduling_strategy": ANYWHERE}
        if others:
            options["fallback_strategy"] = [{"label_selector": selector} for selector in others]
        return options

    def in_order(self, order: Sequence[NodeId]) -> ControllerPlaces:
        """The controller is on the first of ``order`` that lives."""
        each: list[Selector] = [{RAY_NODE_ID_KEY: node} for node in order]
        return ControllerPlaces([*each, *self.selectors], self.likely)


def controller_places(run_url: str) -> ControllerPlaces:
    """Blocks while the GCS is away, and up to LOOK_TIMEOUT_S."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    head = next((node["NodeID"] for node in nodes if HEAD in node["Resources"]), "")
    others = [node for node in nodes if node["NodeID"] != head]
    elsewhere: Selector = {RAY_NODE_ID_KEY: f"!in({head})"} if head else {}
    if not _is_seen(run_url, others, elsewhere):
        here = ray.get_runtime_context().get_node_id()
        log.info("%s is on this machine alone: so is its controller", run_url)
        return ControllerPlaces([{RAY_NODE_ID_KEY: here}], [here])
    wished: list[Selector] = [{LABEL: "true"}, elsewhere, {}]
    likely = [node for node in nodes if node.get("Labels", {}).get(LABEL) == "true"]
    if not likely:
        del wished[0]  # it would wait to see whether one comes
    return ControllerPlaces(wished, [node["NodeID"] for node in likely or others or nodes])


def _is_seen(run_url: str, others: list[dict[str, Any]], elsewhere: Selector) -> bool:
    """Whether other machines of the cluster see the run folder, as one of them says. Raises
    StoreFailed where it can't be written."""
    folder, this_machine = plain_path(run_url), os.uname().nodename
    if folder is None or all(node["NodeManagerHostname"] == this_machine for node in others):
        return True
    store, mark = open_store(run_url), f".seen-{uuid.uuid4().hex}"
    store.put(mark, b"")
    options: dict[str, Any] = {"label_selector": elsewhere, "scheduling_strategy": ANYWHERE}
    looking = ray.remote(num_cpus=0, **options)(os.path.exists).remote(str(folder / mark))
    try:
        return bool(ray.get(looking, timeout=LOOK_TIMEOUT_S))
    except (RayError, GetTimeoutError) as error:
        log.warning("no other node says whether it sees %s: %s", run_url, error)
        ray.cancel(looking)
        return False
    finally:
        with contextlib.suppress(StoreFailed):  # an empty file more
            store.delete(mark)
