"""Every private symbol of Ray that elastic_ft uses, in this one module.

Ray Train's internals change with every minor release, so pyproject pins ``ray==2.60.*`` and
``tests/ray/test_contract.py`` pins the signature of each name below: moving to the next Ray is
reading that test's failures.
"""

from __future__ import annotations

from typing import Any

import ray._private.state
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import RAY_NODE_ID_KEY, GcsClient
from ray.core.generated import autoscaler_pb2

DRAIN_REASONS = {
    "preemption": "DRAIN_NODE_REASON_PREEMPTION",
    "idle": "DRAIN_NODE_REASON_IDLE_TERMINATION",
}


def draining_nodes() -> dict[str, float]:
    """Node id -> unix time at which it goes away; 0 where that is unknown."""
    nodes = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in nodes.items()}


def drain_node(gcs_address: str, node: str, reason: str, deadline_s: float) -> None:
    """Announces the end of ``node`` as a cloud's preemption notice does. Raises RuntimeError."""
    accepted, why = GcsClient(address=gcs_address).drain_node(
        node,
        autoscaler_pb2.DrainNodeReason.Value(DRAIN_REASONS[reason]),
        "elastic_ft",
        int(deadline_s * 1000),
    )
    if not accepted:
        raise RuntimeError(f"the drain of node {node} was refused: {why}")


def start_node(*, head: bool, **params: Any) -> Any:
    """Starts a node's processes as children of this one; the kernel kills them with this thread."""
    defaults = {
        "min_worker_port": 0,
        "max_worker_port": 0,
        "node_manager_port": 0,
        "dashboard_agent_listen_port": None,
        "include_log_monitor": False,
    }
    return Node(
        RayParams(**(defaults | params)), head=head, shutdown_at_exit=False, spawn_reaper=True
    )
