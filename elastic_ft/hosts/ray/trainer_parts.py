"""What Ray Train's controller is given, and what ``ElasticTrainer.fit`` gives back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pyarrow
from ray.train import Checkpoint, TrainingFailedError

from elastic_ft.errors import JobFailed
from elastic_ft.hosts.ray import ray_private

log = logging.getLogger(__name__)


class JobFailedError(JobFailed, TrainingFailedError):
    """What ``ElasticTrainer.fit`` raises, and ``Result.error`` holds, when the job has failed."""


@dataclass
class ElasticResult(ray_private.Result):  # type: ignore[misc]
    """Ray Train's result, and how the job ended: neither end below is an error.

    Attributes:
        status: completed, or stopped: someone asked for it, and a rerun goes on from there.
        reason: in words.
    """

    status: str = ""
    reason: str = ""


class WholeJobPolicy(ray_private.ScalingPolicy):
    """One group for the whole job. Pending placement groups are the autoscaler's demand."""

    def after_controller_start(self, train_run_context: Any) -> None:
        return None

    def make_decision_for_non_running_worker_group(self) -> ray_private.ResizeDecision:
        config = self.scaling_config
        return ray_private.ResizeDecision(config.max_workers, config._resources_per_worker_not_none)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ray_private.NoopDecision:
        return ray_private.NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.max_workers)


class RaiseAlways(ray_private.FailurePolicy):
    """What reaches Ray Train as a failure is final: recovery is elastic_ft's, and is over."""

    def make_decision(
        self, training_failed_error: TrainingFailedError
    ) -> ray_private.FailureDecision:
        return ray_private.FailureDecision.RAISE


def report_milestones() -> None:
    """The train loop of a job without one."""
    import ray.train

    from elastic_ft.worker.this_process import steps_that

    for step in steps_that(lambda s: s.checkpointed or s.last or s.eval_loss is not None):
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


def as_checkpoint(url: str) -> Checkpoint | None:
    """Ray Train's handle of the checkpoints' folder; None where pyarrow does not know the URL."""
    try:
        return Checkpoint(url)
    except (pyarrow.ArrowException, OSError) as error:
        log.warning("Result.checkpoint is left out: %s: %s", url, error)
        return None
