"""What elastic_ft takes for granted of Ray's private code. A new Ray: start reading here."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.state
import ray._private.worker
import ray._raylet
from ray._private.ray_constants import SETUP_WORKER_FILENAME
from ray.exceptions import RpcError
from ray.train._internal.session import _TrainSession
from ray.train.v2._internal.execution.context import ExecutionContext, TrainContext
from ray.train.v2._internal.execution.failure_handling import default
from ray.tune.impl.tuner_internal import _TUNER_PKL, TunerInternal
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.trainable.trainable_fn_utils import _in_tune_session
from ray.util.queue import Queue

from elastic_ft.hosts.ray import ray_private, setup_worker

PACKAGE = Path(ray_private.__file__).parent

# Callables that are called or overridden, with the parameters that are relied upon.
SIGNATURES: dict[str, tuple[Any, str]] = {
    "TrainController.__init__": (
        ray_private.TrainController.__init__,
        "self, train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks, "
        "validation_config",
    ),
    "TrainController.run": (ray_private.TrainController.run, "self"),
    "TrainController._step": (ray_private.TrainController._step, "self"),
    "TrainController._poll_workers": (ray_private.TrainController._poll_workers, "self"),
    "TrainController._execute_resize_decision": (
        ray_private.TrainController._execute_resize_decision,
        "self, decision",
    ),
    "TrainController._start_worker_group": (
        ray_private.TrainController._start_worker_group,
        "self, num_workers, resources_per_worker",
    ),
    "TrainController._shutdown_worker_group": (
        ray_private.TrainController._shutdown_worker_group,
        "self",
    ),
    "TrainController._run_controller_hook": (
        ray_private.TrainController._run_controller_hook,
        "self, hook_name, args, invoke_failure_decision_callbacks, context",
    ),
    "TrainController._get_run_attempt_id": (
        ray_private.TrainController._get_run_attempt_id,
        "self",
    ),
    "TrainController._build_result": (ray_private.TrainController._build_result, "self"),
    "TrainController.get_result": (ray_private.TrainController.get_result, "self"),
    "TrainController.get_state": (ray_private.TrainController.get_state, "self"),
    "WorkerGroup.__init__": (
        ray_private.WorkerGroup.__init__,
        "self, train_run_context, worker_group_context, callbacks",
    ),
    "WorkerGroup._start_impl": (
        ray_private.WorkerGroup._start_impl,
        "self, worker_group_state_builder",
    ),
    "WorkerGroup._get_worker_runtime_env": (
        ray_private.WorkerGroup._get_worker_runtime_env,
        "custom_runtime_env",
    ),
    "WorkerGroup.get_workers": (ray_private.WorkerGroup.get_workers, "self"),
    "RayTrainWorker.init_train_context": (
        ray_private.RayTrainWorker.init_train_context,
        "self, train_run_context, distributed_context, synchronization_actor, storage_context, "
        "worker_callbacks, controller_actor, dataset_shard_provider, checkpoint, "
        "has_validation_fn, current_report_index",
    ),
    "RayTrainWorker.run_train_fn": (ray_private.RayTrainWorker.run_train_fn, "self, train_fn_ref"),
    "RayTrainWorker.poll_status": (ray_private.RayTrainWorker.poll_status, "self"),
    "RayTrainWorker.get_metadata": (ray_private.RayTrainWorker.get_metadata, "self"),
    "TrainContext.report": (
        TrainContext.report,
        "self, metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_mode, "
        "delete_local_checkpoint_after_upload, checkpoint_upload_fn, validation",
    ),
    "TrainContext.next_collective_seq": (TrainContext.next_collective_seq, "self"),
    "DistributedTrainFnUtils.report": (
        ray_private.DistributedTrainFnUtils.report,
        "self, metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_mode, "
        "delete_local_checkpoint_after_upload, checkpoint_upload_fn, validation",
    ),
    "DistributedTrainFnUtils.barrier": (ray_private.DistributedTrainFnUtils.barrier, "self"),
    "DistributedTrainFnUtils.broadcast_from_rank_zero": (
        ray_private.DistributedTrainFnUtils.broadcast_from_rank_zero,
        "self, data",
    ),
    "DistributedTrainFnUtils.get_preemption_info": (
        ray_private.DistributedTrainFnUtils.get_preemption_info,
        "self",
    ),
    "ReportCallback.after_report": (
        ray_private.ReportCallback.after_report,
        "self, training_report, metrics",
    ),
    "ReplicaGroup.__init__": (
        ray_private.ReplicaGroup.__init__,
        "self, workers, resources_per_worker, callbacks",
    ),
    "ReplicaGroupCallback.after_replica_group_start": (
        ray_private.ReplicaGroupCallback.after_replica_group_start,
        "self, replica_group",
    ),
    "WorkerGroupCallback.before_worker_group_start": (
        ray_private.WorkerGroupCallback.before_worker_group_start,
        "self, worker_group_context",
    ),
    "WorkerGroupCallback.after_worker_group_poll_status": (
        ray_private.WorkerGroupCallback.after_worker_group_poll_status,
        "self, worker_group_status",
    ),
    "WorkerGroupCallback.before_init_train_context": (
        ray_private.WorkerGroupCallback.before_init_train_context,
        "self, workers",
    ),
    "ScalingPolicy.__init__": (ray_private.ScalingPolicy.__init__, "self, scaling_config"),
    "FailurePolicy.make_decision": (
        ray_private.FailurePolicy.make_decision,
        "self, training_failed_error",
    ),
    "FailurePolicy.__init__": (default.DefaultFailurePolicy.__init__, "self, failure_config"),
    "DataParallelTrainer._initialize_and_run_controller": (
        ray_private.DataParallelTrainer._initialize_and_run_controller,
        "self, controller_init_kwargs",
    ),
    "DataParallelTrainer._create_default_callbacks": (
        ray_private.DataParallelTrainer._create_default_callbacks,
        "self",
    ),
    "PlacementGroupHandle.wait": (ray_private.PlacementGroupHandle.wait, "self, timeout_seconds"),
    "_shutdown_workers": (ray_private.shutdown_workers, "workers, patience_s"),
    "bundle_to_remote_args": (ray_private.bundle_to_remote_args, "bundle"),
    "get_env_vars_to_propagate": (ray_private.get_env_vars_to_propagate, ""),
    "set_train_fn_utils": (ray_private.set_train_fn_utils, "train_fn_utils"),
    "get_train_context": (ray_private.get_train_context, ""),
    "GlobalState.get_draining_nodes": (
        ray._private.state.GlobalState.get_draining_nodes,
        "self",
    ),
    "state.actors": (ray._private.state.actors, "actor_id, job_id, actor_state_name"),
    "print_to_stdstream": (ray._private.worker.print_to_stdstream, "data, ignore_prefix"),
    "Node.__init__": (
        ray_private.Node.__init__,
        "self, ray_params, head, shutdown_at_exit, spawn_reaper, connect_only, default_worker, "
        "ray_init_cluster",
    ),
    "Node.kill_all_processes": (
        ray_private.Node.kill_all_processes,
        "self, check_alive, allow_graceful, wait",
    ),
}

FIELDS: dict[type, str] = {
    ray_private.DistributedContext: "world_rank world_size local_rank local_world_size node_rank",
    ray_private.Worker: "actor metadata resources distributed_context log_file_path "
    "placement_group_bundle_index",
    ray_private.WorkerStatus: "running error training_report return_value preemption_info",
    ray_private.WorkerGroupPollStatus: "worker_statuses worker_rank_to_replica_group_rank",
    ray_private.WorkerGroupState: "start_time placement_group_handle workers sync_actor",
    ray_private.WorkerGroupContext: "run_attempt_id train_fn_ref num_workers resources_per_worker "
    "placement_strategy label_selector num_slices",
    ray_private.TrainControllerLoopIterationResult: "run_attempt_id previous_state next_state "
    "training_failed_error",
    ray_private.ResizeDecision: "num_workers resources_per_worker",
    ray_private.PreemptionContext: "preemption_info",
    ExecutionContext: "synchronization_actor result_queue training_thread_runner "
    "train_context_callbacks",
}


def test_ray_is_the_pinned_one() -> None:
    assert ray.__version__.startswith("2.60.")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function, expected = SIGNATURES[name]
    assert ", ".join(inspect.signature(function).parameters) == expected


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_fields(record: type) -> None:
    assert " ".join(f.name for f in dataclasses.fields(record)) == FIELDS[record]


def test_train_context_has_what_a_seat_replaces() -> None:
    fields = {f.name for f in dataclasses.fields(TrainContext)}
    assert fields >= {
        "distributed_context",
        "execution_context",
        "preemption_context",
        "current_report_index",
        "report_call_index",
        "collective_seq",
    }
    assert not TrainContext.__dataclass_params__.frozen


def test_what_the_controller_keeps_under_private_names() -> None:
    """Attributes that ElasticController and ElasticWorkerGroup read or replace."""
    source = inspect.getsource(ray_private.TrainController)
    for name in (
        "_worker_group_callbacks_to_propagate",
        "_report_handler",
        "_checkpoint_manager",
        "_health_check_interval_s",
        "_worker_group",
        "_train_run_context",
        "_train_fn_ref",
    ):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    source = inspect.getsource(ray_private.WorkerGroup)
    for name in (
        "_callbacks",
        "_replica_group_callbacks",
        "_execution_group_callbacks",
        "_worker_callbacks_to_propagate",
        "_worker_group_state",
        "_worker_group_context",
        "_replica_groups",
        "_worker_rank_to_replica_group_rank",
        "_latest_poll_status",
        "_storage_context",
    ):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    assert "self._report_callbacks = " in inspect.getsource(ray_private.ReportCallbackHandler)
    assert "self._current_report_index = " in inspect.getsource(ray_private.CheckpointManager)


def test_what_a_trial_of_tune_keeps_under_private_names() -> None:
    """``TrialReports`` takes the queue's place; the event is set, never cleared, by ``finish``."""
    source = inspect.getsource(TuneReportCallback)
    assert "self._training_actor_item_queue = (" in source
    assert "self._training_actor_item_queue.put(metrics)" in source
    assert ", ".join(inspect.signature(Queue.put).parameters) == "self, item, block, timeout"
    source = inspect.getsource(_TrainSession)
    assert "self.stop_event = threading.Event()" in source
    assert "self._inter_actor_queue: " in source
    assert "self.world_rank = world_rank" in source
    assert "self.stop_event.set()" in inspect.getsource(_TrainSession.finish)
    assert "world_rank is None" in inspect.getsource(_in_tune_session)


def test_where_a_sweep_is_written_before_its_trials_start() -> None:
    """``sweep_as_written`` reads it: the scheduler's class is named in it."""
    assert _TUNER_PKL == "tuner.pkl"
    source = inspect.getsource(TunerInternal)
    assert "Path(storage.experiment_fs_path, _TUNER_PKL)" in source
    assert "state.pop(_TRAINABLE_KEY, None)" in source
    assert "self.storage = storage" in inspect.getsource(_TrainSession)


def test_a_report_that_its_barrier_refuses_returns_and_is_not_counted() -> None:
    source = inspect.getsource(TrainContext.report)
    assert "isinstance(e.cause, SynchronizationBarrierResetError)" in source
    assert "self.report_call_index -= 1" in source
    assert "self.collective_seq -= 1" in source


@pytest.mark.parametrize("kind", ["Error", "Log"])
def test_a_driver_rests_while_the_gcs_is_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray asks in a loop was asked 20,000 times a second, by drivers beside workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    made = getattr(ray._raylet, f"Gcs{kind}Subscriber")(worker_id=bytes(28), address=address)
    with pytest.raises(RpcError, match="connect"):
        made.subscribe()
    until_s, asked = time.monotonic() + 1.0, 0
    while time.monotonic() < until_s:
        made.poll()
        asked += 1
    assert asked < 10
    monkeypatch.setattr(ray_private, "REST_S", 60.0)
    closing = threading.Timer(0.05, made.close)
    closing.start()
    begun_s = time.monotonic()
    made.poll()
    closing.join()
    assert time.monotonic() - begun_s < 30, "who closes it wakes it"


def test_what_is_forked_draws_ids_of_its_own() -> None:
    """Where a class of Ray's is made as it is imported, under ``undrawn``; and a node takes our
    script to set up its workers."""
    code = (
        "from elastic_ft.hosts.ray.ray_ids import draws_apart, undrawn\n"
        "import ray\n"
        "with undrawn(): Some = ray.remote(type('Some', (), {}))\n"
        "print(draws_apart())\n"
        "Some = ray.remote(type('Some', (), {}))\n"
        "print(draws_apart())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed.split() == ["True", "False"]
    assert Path(setup_worker.__file__).name == SETUP_WORKER_FILENAME
    assert "setup_worker_path" in inspect.signature(ray_private.RayParams).parameters


def test_private_ray_stays_in_compat() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name in ("ray_private.py", "ray_ids.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                parts = module.split(".")
                private = parts[0] == "ray" and any(p.startswith("_") or p == "v2" for p in parts)
                assert not private, f"{path.name} imports {module}: it belongs in ray_private.py"
