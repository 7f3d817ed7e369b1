"""``ElasticTrainer``: Ray Train's trainer for a job that outlives its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from elastic_ft.config import Job, load_job, parse_job
from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.errors import ConfigError
from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.causes import describe
from elastic_ft.hosts.ray.controller_actor import (
    ElasticController,
    ElasticResult,
    FollowedRun,
    JobFailedError,
    RaiseAlways,
    WholeJobPolicy,
    as_checkpoint,
)
from elastic_ft.hosts.ray.placement_groups import remove_placement_groups
from elastic_ft.hosts.ray.ray_private import (
    RAY_NODE_ID_KEY,
    BackendConfig,
    DataParallelTrainer,
    DatasetsCallback,
    PlacementGroupCleanerCallback,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFramework,
    WorkingDirectorySetupCallback,
    get_env_vars_to_propagate,
)
from elastic_ft.observe.outcome import complete
from elastic_ft.observe.run_reader import RunReader

log = logging.getLogger(__name__)
CONTROLLER_STARTS = 4
UNUSED_CALLBACKS = (
    DatasetsCallback,  # data is sharded by elastic_ft
    PlacementGroupCleanerCallback,  # knows one placement group; see remove_placement_groups
    WorkingDirectorySetupCallback,  # a job's relative paths mean the same in every process
)
CONTROLLER_CONCURRENCY = 10_000  # calls at once: each worker waits in one at a report's barrier
CONTROLLER_ENVIRONMENT = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}  # as Ray Train sets it


class ElasticBackendConfig(BackendConfig):
    """Process groups are formed by the workers themselves, generation by generation."""

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH


class ElasticTrainer(DataParallelTrainer):
    """Trains a job on a Ray cluster; workers and nodes may come and go.

    Args:
        train_loop_or_task: a task is a job: a Job, its values as a dict, or the path of its YAML
            file; every evaluation, checkpoint and the end is reported to Ray Train. A train loop
            runs on each worker, iterates over ``elastic_ft.train()`` and reports what it likes.
        job: of a train loop; by default ``train_loop_config["job"]``.
        train_loop_config: the argument of the train loop, if it takes one.
        scaling_config: ``num_workers=(min, max)`` overrides the job's elastic section.
        run_config: its ``storage_path`` and ``name`` make the run folder.
        faults: to inject at named points.
        accept_changes: go on from a checkpoint that was trained under other terms: another seed,
            batch, optimizer, other data. Otherwise that is refused.
    """

    def __init__(
        self,
        train_loop_or_task: Callable[..., Any] | Job | Mapping[str, Any] | str | Path,
        *,
        job: Job | Mapping[str, Any] | str | Path | None = None,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        faults: Sequence[PointFault] = (),
        accept_changes: bool = False,
    ) -> None:
        train_loop, self.job = loop_and_job(train_loop_or_task, job, train_loop_config)
        self._scales_itself = scaling_config is None
        if scaling_config is None:
            scaling_config = default_scaling(self.job)
        else:
            self.job = scaled(self.job, scaling_config)
            check_gpus(self.job, scaling_config)
        run_config = run_config or RunConfig(name=self.job.name)
        environment = dict(run_config.worker_runtime_env or {})
        environment["env_vars"] = WORKER_ENVIRONMENT | environment.get("env_vars", {})
        run_config = dataclasses.replace(run_config, worker_runtime_env=environment)
        self._faults = tuple(faults)
        self._accept_changes = accept_changes
        self._controller: Any = None
        super().__init__(
            train_loop,
            train_loop_config=train_loop_config,
            backend_config=ElasticBackendConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
        )

    @property
    def run_url(self) -> str:
        """The run folder: Ray Train's own folder of the experiment."""
        return f"{str(self.run_config.storage_path).rstrip('/')}/{self.run_config.name}"

    def fit(self) -> Result:
        """As Ray Train's. Only now is a cluster sure to be there, to be asked for its GPUs."""
        if not ray.is_initialized():
            ray.init()
        if self._scales_itself:
            self.scaling_config = default_scaling(self.job)
            self.train_run_context = dataclasses.replace(
                self.train_run_context, scaling_config=self.scaling_config
            )
        if self.scaling_config.use_gpu:
            self.job = on_gpus(self.job)
        elif self.job.parallel.may_use_gpu and cluster_gpus():
            log.warning(
                "the cluster has GPUs, and scaling_config gives the workers none: the job trains "
                "on CPUs (ScalingConfig(use_gpu=True), or parallel.device: cpu if that is meant)"
            )
        return super().fit()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, UNUSED_CALLBACKS)]

    def _initialize_and_run_controller(self, **kwargs: Any) -> Result:
        """Runs a controller to the job's end; one that dies is followed by another."""
        if ended := self._complete():
            return ended
        kwargs["scaling_policy"] = WholeJobPolicy(self.scaling_config)
        kwargs["failure_policy"] = RaiseAlways(self.run_config.failure_config)
        placements = f"elastic_ft:{uuid.uuid4().hex}:"
        try:
            for attempt in range(CONTROLLER_STARTS):
                run = FollowedRun(
                    self.job,
                    self.run_url,
                    self.job.checkpoint.url or f"{self.run_url}/checkpoints",
                    attempt,
                    placements,
                    self._faults,
                    self._accept_changes,
                )
                try:
                    return self._run_once(run, kwargs)
                except RayActorError as error:
                    if error.actor_init_failed:
                        raise  # the next one would not start either
                    log.warning("a controller has ended: %s; another one starts", describe(error))
                    remove_placement_groups(placements)
        finally:
            remove_placement_groups(placements)
        raise JobFailedError(
            f"{CONTROLLER_STARTS} controllers died; the newest checkpoint is under "
            f"{self.job.checkpoint.url or self.run_url}"
        )

    def _complete(self) -> ElasticResult | None:
        """The result of a job that an earlier run has completed: nothing is started for it."""
        ended = RunReader(self.run_url).result()
        if not complete(ended, self.job.steps) or self.job.checkpoint.from_scratch:
            return None
        return ElasticResult(
            metrics=ended,
            checkpoint=as_checkpoint(self.job.checkpoint.url or f"{self.run_url}/checkpoints"),
            error=None,
            path=self.run_url,
            status=ended["status"],
            reason=ended.get("reason", ""),
        )

    def _run_once(self, run: FollowedRun, kwargs: dict[str, Any]) -> Result:
        here = {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        actor_class = ray.remote(
            num_cpus=0,
            max_concurrency=CONTROLLER_CONCURRENCY,
            label_selector=here,
            runtime_env={"env_vars": CONTROLLER_ENVIRONMENT | get_env_vars_to_propagate()},
        )(ElasticController)
        self._controller = actor_class.remote(run=run, **kwargs)
        try:
            with self._interruptible():
                ray.get(self._controller.run.remote())
                return ray.get(self._controller.get_result.remote())
        finally:
            ray.kill(self._controller)
            self._controller = None

    def stop(self, reason: str) -> None:
        """From another thread than ``fit``: a clean stop after the running step, with a checkpoint.

        The second time: at once.
        """
        if self._controller is not None:
            self._controller.stop.remote(reason)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl C is ``stop``, where signals can be caught: in the main thread.

        The third one ends the driver, and with it the controller: it may be stuck.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupts = 0

        def on_interrupt(signum: int, frame: Any) -> None:
            nonlocal interrupts
            interrupts += 1
            if interrupts > 2:
                raise KeyboardInterrupt
            self.stop("interrupted")

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def report_milestones() -> None:
    """The train loop of a job without one."""
    import ray.train

    from elastic_ft.worker.worker import train

    for step in train():
        if step.checkpointed or step.last or step.eval_loss is not None:
            ray.train.report(
                {
                    "step": step.number,
                    "loss": step.loss,
                    "eval_loss": step.eval_loss,
                    "lr": step.learning_rate,
                    "generation": step.generation,
                    "world_size": step.world_size,
                }
            )


def loop_and_job(
    train_loop_or_task: Any, job: Any, train_loop_config: dict[str, Any] | None
) -> tuple[Callable[..., Any], Job]:
    """Raises ConfigError."""
    if not callable(train_loop_or_task):
        return report_milestones, as_job(train_loop_or_task)
    job = job if job is not None else (train_loop_config or {}).get("job")
    if job is None:
        raise ConfigError("job: a train loop needs one, as job=... or train_loop_config['job']")
    return train_loop_or_task, as_job(job)


def as_job(job: Job | Mapping[str, Any] | str | Path) -> Job:
    """Raises ConfigError."""
    if isinstance(job, Job):
        return job
    return parse_job(dict(job)) if isinstance(job, Mapping) else load_job(job)


def cluster_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def default_scaling(job: Job) -> ScalingConfig:
    """Workers with a GPU each, where the job or the cluster says so."""
    parallel = job.parallel
    return ScalingConfig(
        num_workers=(job.elastic.min_workers, job.elastic.max_workers),
        use_gpu=parallel.wants_gpu or (parallel.may_use_gpu and cluster_gpus() > 0),
    )


def check_gpus(job: Job, scaling: ScalingConfig) -> None:
    """Raises ConfigError where the job is for GPUs and its workers get none."""
    if job.parallel.wants_gpu and not scaling.use_gpu:
        raise ConfigError(
            "parallel.device: the job is for GPUs, and scaling_config gives its workers none; "
            "expected ScalingConfig(use_gpu=True)"
        )


def on_gpus(job: Job) -> Job:
    """``job``, for GPUs where it may be: a worker whose GPU is not seen must not train beside the
    others on its CPU, it is refused."""
    if not job.parallel.may_use_gpu:
        return job
    parallel = job.parallel.model_copy(update={"device": "cuda"})
    return job.model_copy(update={"parallel": parallel})


def scaled(job: Job, scaling: ScalingConfig) -> Job:
    """``job`` with the numbers of workers of ``scaling``. Raises ConfigError."""
    if scaling.max_workers < 1:
        raise ConfigError(f"num_workers: expected at least 1, found {scaling.num_workers}")
    numbers = {"min_workers": scaling.min_workers, "max_workers": scaling.max_workers}
    values = job.model_dump()
    return parse_job(values | {"elastic": values["elastic"] | numbers})
