"""Every private symbol of Ray that elastic_ft uses, in this one module.

Ray Train's internals change with every minor release, so pyproject pins ``ray==2.60.*`` and
``tests/ray/test_contract.py`` pins the shape of each name below: moving to the next Ray is
reading that test's failures.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray._private.state
import ray._private.worker
import ray._raylet
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (
    RAY_NODE_ID_KEY,
    GcsClient,
    GcsErrorSubscriber,
    GcsLogSubscriber,
    PlacementGroupID,
)
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv
from ray.train._internal.session import get_session
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.callbacks.user_callback import UserCallbackHandler
from ray.train.v2._internal.callbacks.working_dir_setup import WorkingDirectorySetupCallback
from ray.train.v2._internal.constants import (
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.execution.callback import (
    ReplicaGroupCallback,
    ReportCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationBarrierResetError
from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
from ray.train.v2._internal.execution.controller.controller import (
    TrainController,
    TrainControllerLoopIterationResult,
)
from ray.train.v2._internal.execution.controller.state import (
    RunningState,
    SchedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.scaling_policy.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.train_fn_utils import (
    DistributedTrainFnUtils,
    set_train_fn_utils,
)
from ray.train.v2._internal.execution.training_report import _TrainingReport as TrainingReport
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import (
    WorkerGroupContext,
    WorkerGroupState,
)
from ray.train.v2._internal.execution.worker_group.state import (
    _shutdown_workers as shutdown_workers,
)
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.logging.logging import get_train_application_worker_log_path
from ray.train.v2._internal.util import TrainingFramework, bundle_to_remote_args, time_monotonic
from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result

REST_S = 0.25
DRAIN_REASONS = {
    "preemption": "DRAIN_NODE_REASON_PREEMPTION",
    "idle": "DRAIN_NODE_REASON_IDLE_TERMINATION",
}


class _Resting:
    """By which a driver listens to errors, or logs. Ray's thread asks again as soon as it is told
    that there is nothing. While the GCS is away that is at once: it took a core, of those that
    train where the driver runs."""

    def __init__(self, *args: Any, **where: Any) -> None:
        super().__init__(*args, **where)
        self._closed = threading.Event()

    def poll(self, timeout: float | None = None) -> Any:
        asked_s = time.monotonic()
        found = super().poll(timeout)  # type: ignore[misc]
        if time.monotonic() - asked_s < REST_S:
            content = found[1] if isinstance(found, tuple) else found and found["lines"]
            if not content:
                self._closed.wait(REST_S)
        return found

    def close(self) -> None:
        self._closed.set()
        super().close()  # type: ignore[misc]


class RestingErrorSubscriber(_Resting, GcsErrorSubscriber):
    pass


class RestingLogSubscriber(_Resting, GcsLogSubscriber):
    pass


# Of every driver that imports this before it connects, whoever connects it.
ray._raylet.GcsErrorSubscriber = RestingErrorSubscriber
ray._raylet.GcsLogSubscriber = RestingLogSubscriber


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


def actors_on(node: str) -> list[str]:
    """Names of the live actors there."""
    found = ray._private.state.actors(actor_state_name="ALIVE").values()
    return [actor["Name"] for actor in found if actor["Address"]["NodeID"] == node]


def actor_is_gone(actor: str) -> bool:
    """Whether the actor of that id (hex) is gone for good. Blocks while the GCS is away."""
    found = ray._private.state.actors(actor_id=actor)
    return not found or found["State"] == "DEAD"


def tune_session() -> Any:
    """Of the trial of Ray Tune's whose function this process runs, None elsewhere."""
    session = get_session()
    return session if session is not None and session.world_rank is None else None


def sweep_as_written() -> bytes:
    """What ``tune.Tuner`` has pickled of the sweep of that trial, its configuration without what is
    trained; empty where there is none. Raises OSError."""
    session = tune_session()
    if session is None:
        return b""
    path = f"{session.storage.experiment_fs_path}/tuner.pkl"
    try:
        with session.storage.storage_filesystem.open_input_stream(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return b""


def reports_waiting() -> Any:
    """The queue of the reports that callbacks make to that trial, None where it has none."""
    session = tune_session()
    return session._inter_actor_queue if session is not None else None


def reporting_by(callback: Any, other: Callable[[Any], Any]) -> Any:
    """``callback``; where it is Tune's that reports to a trial, a copy of it which does so by
    ``other`` of its queue. In a process of Tune's."""
    from ray.tune.integration.ray_train import TuneReportCallback

    if not isinstance(callback, TuneReportCallback):
        return callback
    reporting = copy.copy(callback)
    reporting._training_actor_item_queue = other(callback._training_actor_item_queue)
    return reporting


def silence_raylets() -> None:
    """Keeps what raylets say of dead workers and nodes off this driver's standard output."""
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None


def forget_head() -> None:
    """Of one that this process has started and never joined. Who asks it unasked (a trainer, for
    Ray's statistics) would end this process, a minute after that head has ended."""
    internal_kv._internal_kv_reset()


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


def logs_folder() -> Path:
    """Of this node: where Ray keeps what its processes print."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())
