"""``ElasticTrainer``: Ray Train's trainer for a job that outlives its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from elastic_ft.config import Job, load_job, parse_job
from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.errors import ConfigError
from elastic_ft.faults import PointFault
from elastic_ft.hosts.interrupts import stopping
from elastic_ft.hosts.ray import ray_private
from elastic_ft.hosts.ray.causes import why_gone
from elastic_ft.hosts.ray.controller_actor import ALIVE, ALIVE_CALLS, ElasticController
from elastic_ft.hosts.ray.controller_place import controller_places
from elastic_ft.hosts.ray.local_templates import local_executable
from elastic_ft.hosts.ray.names import NAMESPACE, RunNames, actor_named, reap
from elastic_ft.hosts.ray.started_by import KEY, environment_by, executable_of
from elastic_ft.hosts.ray.submission import ByValue, Submission, has_begun, write_submission
from elastic_ft.hosts.ray.trainer_parts import (
    ElasticResult,
    JobFailedError,
    RaiseAlways,
    WholeJobPolicy,
    as_checkpoint,
    report_milestones,
)
from elastic_ft.hosts.ray.tune_trial import trial_here, with_patience
from elastic_ft.hosts.ray.warm_standby import standby_executable, standby_of
from elastic_ft.observe.handover import await_handover
from elastic_ft.observe.outcome import complete
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.transport.tls import new_key
from elastic_ft.worker.user_script import run_script

log = logging.getLogger(__name__)
ASK_AGAIN_S = 0.5
END_TIMEOUT_S = 30.0  # of a controller whose job has ended
LOOK_S = 30.0  # at the run folder, while the controller has not said how the job has ended
UNANSWERED_S = 900.0  # since the run folder says it: for reports, and what users' callbacks do
ENDED_WELL = ("completed", "stopped")
UNUSED_CALLBACKS = (
    ray_private.DatasetsCallback,  # data is sharded by elastic_ft
    ray_private.PlacementGroupCleanerCallback,  # knows one group; see remove_placement_groups
    ray_private.WorkingDirectorySetupCallback,  # a job's relative paths mean the same everywhere
)
CONTROLLER_CONCURRENCY = 10_000  # calls at once: each worker waits in one at a report's barrier
CONTROLLER_ENVIRONMENT = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}  # as Ray Train sets it


class ElasticBackendConfig(ray_private.BackendConfig):
    """Process groups are formed by the workers themselves, generation by generation."""

    @property
    def framework(self) -> ray_private.TrainingFramework:
        return ray_private.TrainingFramework.TORCH


class ElasticTrainer(ray_private.DataParallelTrainer):
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
        scaling_config: ray_private.ScalingConfig | None = None,
        run_config: ray_private.RunConfig | None = None,
        faults: Sequence[PointFault] = (),
        accept_changes: bool = False,
    ) -> None:
        train_loop, self.job = loop_and_job(train_loop_or_task, job, train_loop_config)
        self._scales_itself = scaling_config is None
        if scaling_config is None:
            scaling_config = default_scaling(self.job)
        else:
            self.job = with_workers_of(self.job, scaling_config)
            check_gpus(self.job, scaling_config)
        run_config = run_config or ray_private.RunConfig(name=self.job.name)
        environment = dict(run_config.worker_runtime_env or {})
        environment["env_vars"] = WORKER_ENVIRONMENT | environment.get("env_vars", {})
        self._trial = trial_here()
        run_config = dataclasses.replace(
            run_config,
            worker_runtime_env=environment,
            callbacks=with_patience(self._trial, run_config.callbacks),
        )
        self._faults = tuple(faults)
        self._accept_changes = accept_changes
        self._controller: Any = None
        self._earlier: dict[str, Any] = {}  # what was in result.json before
        self._asked: list[str] = []  # to stop, and no controller has been told so
        self._is_left = False
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

    def fit(self) -> ray_private.Result:
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
        self._use_templates()
        return super().fit()

    def _use_templates(self) -> None:
        """Of a local cluster's nodes, where there are any."""
        environment = self.run_config.worker_runtime_env or {}
        if KEY in environment or not (executable := local_executable()):
            return
        environment = environment | {KEY: executable}
        self.run_config = dataclasses.replace(self.run_config, worker_runtime_env=environment)
        self.train_run_context = dataclasses.replace(
            self.train_run_context, run_config=self.run_config
        )

    def start(self) -> None:
        """Leaves the job to the cluster: returns once its controller is asked for.

        Raises what ``fit`` raises before anything is started.
        """
        self._is_left = True
        self.fit()

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, UNUSED_CALLBACKS)]

    def _initialize_and_run_controller(self, **kwargs: Any) -> ray_private.Result:
        """Starts a controller, and waits for the job's end: this process is but a spectator."""
        if ended := self._complete():
            return ended
        self._take_turn()
        if ended := self._complete():  # by the one that was asked
            return ended
        self._start(kwargs)
        if self._is_left:
            return ElasticResult(None, None, None, self.run_url, status="running", reason="")
        return self._await_end()

    @property
    def _names(self) -> RunNames:
        return RunNames(self.job.name, self.run_url)

    def _take_turn(self) -> None:
        """Ends the run folder's earlier run on this cluster, if there is one: a controller that
        lives hands over. What is left of one that can't come back is cleared away."""
        if actor_named(self._names.controller) is not None:
            self._refuse_strangers()
            await_handover(self.run_url, log.info)
            if RunReader(self.run_url).result():  # it has ended in good order, and says so
                self._await_its_end()
        for name in reap(self._names.prefix):
            log.info("an earlier run has left %s: removed", name)

    def _refuse_strangers(self) -> None:
        """Raises ConfigError where the controller of these names writes another folder: the same
        path on another machine's disk. One that ended before it began is waited for."""
        if has_begun(self.run_url):
            return
        self._await_its_end()
        if actor_named(self._names.controller) is not None and not has_begun(self.run_url):
            raise ConfigError(
                f"run_config: a run of job {self.job.name!r} in {self.run_url} lives on this "
                "cluster, and its folder is not this machine's: expected another name, another "
                "folder, or one that both machines see"
            )

    def _await_its_end(self) -> None:
        until_s = time.monotonic() + END_TIMEOUT_S
        while actor_named(self._names.controller) is not None and time.monotonic() < until_s:
            time.sleep(ASK_AGAIN_S)

    def _start(self, kwargs: dict[str, Any]) -> None:
        self._earlier = RunReader(self.run_url).result()
        places, standby = controller_places(self.run_url), None
        environment = self._controller_environment
        if self._has_standby:
            standby = standby_of(self._names.prefix, places, environment["env_vars"])
            places = places.in_order(standby.order)
        kwargs["scaling_policy"] = WholeJobPolicy(self.scaling_config)
        kwargs["failure_policy"] = RaiseAlways(self.run_config.failure_config)
        kwargs["train_fn_ref"] = ByValue(kwargs["train_fn_ref"].get())
        submitted = write_submission(
            Submission(
                self.job,
                self.run_url,
                self._checkpoint_url,
                self._names.prefix,
                self._faults,
                self._accept_changes,
                kwargs,
                standby,
                None if self._is_left else self._trial,
            )
        )
        actor_class = ray.remote(
            num_cpus=0,
            max_concurrency=CONTROLLER_CONCURRENCY,
            concurrency_groups={ALIVE: ALIVE_CALLS},
            max_restarts=-1,
            lifetime="detached",
            name=self._names.controller,
            namespace=NAMESPACE,
            runtime_env=environment,
            **places.options,
        )(ElasticController)
        self._controller = actor_class.remote(submitted, new_key(tls=self.job.network.tls))
        self._pass_on()

    @property
    def _has_standby(self) -> bool:
        """Where all processes are forked from templates, so is a controller."""
        return self.job.elastic.standby and not executable_of(self.run_config)

    @property
    def _controller_environment(self) -> dict[str, Any]:
        executable = executable_of(self.run_config)
        if self._has_standby:
            executable = standby_executable(self._names.prefix)
        own = CONTROLLER_ENVIRONMENT | ray_private.get_env_vars_to_propagate()
        return environment_by(executable, own)

    @property
    def _checkpoint_url(self) -> str:
        return self.job.checkpoint.url or f"{self.run_url}/checkpoints"

    def _await_end(self) -> ray_private.Result:
        """Raises RayActorError where no controller comes up; JobFailedError where its job is no
        more."""
        try:
            with stopping(lambda: self.stop("interrupted")):
                result = self._ask_for_result()
                if self._trial is not None:
                    self._trial.wait_for_reports()
        except KeyboardInterrupt:  # it is stuck, or the user can't wait
            self._dismiss()
            if actor_named(self._names.controller) is None:
                reap(self._names.prefix)
            raise
        self._dismiss()
        return result

    def _dismiss(self) -> None:
        """This controller, and no other: the run folder may be another driver's by now."""
        ray.kill(self._controller)
        self._controller = None
        self._asked.clear()

    def _ask_for_result(self) -> ray_private.Result:
        has_lived = False
        while True:
            try:
                answer = self._controller.await_result.remote()
                if self._trial is not None:
                    self._trial.wait_for(answer, self._controller)
                return self._answered(answer)
            except ActorUnavailableError as error:  # Ray starts it again
                has_lived = True
                log.info("the controller is away: %s", why_gone(error))
                time.sleep(ASK_AGAIN_S)
            except RayActorError as error:
                if error.actor_init_failed and not has_lived:
                    raise
                last = RunReader(self.run_url).result()
                return self._ended(last, "the controller is gone", why_gone(error))

    def _answered(self, answer: Any) -> ray_private.Result:
        """A job takes as long as it takes; a controller that stands still meanwhile is ended by
        its keepers, and another one answers. Those are released as the job ends: one that stands
        still after that is not waited for. Raises what ``ray.get`` raises; JobFailedError."""
        since_s = None
        while True:
            try:
                return ray.get(answer, timeout=LOOK_S)
            except GetTimeoutError:
                last = RunReader(self.run_url).result()
                if last in ({}, self._earlier):
                    since_s = None
                    continue
                since_s = since_s or time.monotonic()
                if time.monotonic() - since_s > UNANSWERED_S:
                    log.warning(
                        "the controller does not say how its job has ended: its folder does"
                    )
                    return self._ended(last, "the controller does not answer", "no reason")

    def _ended(self, last: dict[str, Any], what: str, why: str) -> ray_private.Result:
        """By what is in result.json. Raises JobFailedError where the job has not ended well."""
        if last.get("status") in ENDED_WELL:
            return self._result_of(last)
        raise JobFailedError(
            f"{what}: {last.get('reason') or why}; the newest checkpoint is under "
            f"{self._checkpoint_url}"
        )

    def _complete(self) -> ElasticResult | None:
        """The result of a job that an earlier run has completed: nothing is started for it."""
        ended = RunReader(self.run_url).result()
        if not complete(ended, self.job.steps) or self.job.checkpoint.from_scratch:
            return None
        return self._result_of(ended)

    def _result_of(self, ended: dict[str, Any]) -> ElasticResult:
        """Of what is in result.json: whoever could tell more is gone."""
        return ElasticResult(
            metrics=ended,
            checkpoint=as_checkpoint(self._checkpoint_url),
            error=None,
            path=self.run_url,
            status=ended["status"],
            reason=ended.get("reason", ""),
        )

    def stop(self, reason: str) -> None:
        """From another thread than ``fit``: a clean stop after the running step, with a checkpoint.

        The second time: at once. Before there is a controller, it is told as soon as there is one.
        """
        self._asked.append(reason)
        self._pass_on()

    def _pass_on(self) -> None:
        """In the thread of ``fit``, and in those that ask: each request is passed on once."""
        with contextlib.suppress(IndexError):
            while self._controller is not None:
                self._controller.stop.remote(self._asked.pop(0))


def loop_and_job(
    train_loop_or_task: Any, job: Any, train_loop_config: dict[str, Any] | None
) -> tuple[Callable[..., Any], Job]:
    """Raises ConfigError."""
    if not callable(train_loop_or_task):
        job = as_job(train_loop_or_task)
        loop = job.loop
        if loop is not None and loop.script is not None:
            return lambda: run_script(loop), job
        return report_milestones, job
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


def default_scaling(job: Job) -> ray_private.ScalingConfig:
    """Workers with a GPU each, where the job or the cluster says so."""
    parallel = job.parallel
    return ray_private.ScalingConfig(
        num_workers=(job.elastic.min_workers, job.elastic.max_workers),
        use_gpu=parallel.wants_gpu or (parallel.may_use_gpu and cluster_gpus() > 0),
    )


def check_gpus(job: Job, scaling: ray_private.ScalingConfig) -> None:
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


def with_workers_of(job: Job, scaling: ray_private.ScalingConfig) -> Job:
    """``job`` with the numbers of workers of ``scaling``. Raises ConfigError."""
    if scaling.max_workers < 1:
        raise ConfigError(f"num_workers: expected at least 1, found {scaling.num_workers}")
    numbers = {"min_workers": scaling.min_workers, "max_workers": scaling.max_workers}
    values = job.model_dump()
    return parse_job(values | {"elastic": values["elastic"] | numbers})
