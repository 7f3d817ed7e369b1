"""The core's policy, made of the job file."""

from __future__ import annotations

from elastic_ft.config import Job
from elastic_ft.controller.publisher import CHECKPOINTS_KNOWN
from elastic_ft.core import deadlines
from elastic_ft.core.hangs import LAST_RESORT_TIMEOUTS
from elastic_ft.core.layouts.planner import Planning
from elastic_ft.core.policy import Policy, same_names

LAST_TRY_S = 180.0  # for the publisher's last attempt, some calls of a minute, and its word
RETURN_S = 5.0  # for workers and keepers to look, and call


def policy_of(job: Job) -> Policy:
    """Raises UsageError where the planner is to lay out what it can't."""
    elastic, checkpoint = job.elastic, job.checkpoint
    pause_s = deadlines.pause_s(elastic.pause_timeout_s, elastic.max_workers)
    given = same_names(Policy, job.parallel, elastic, job.snapshot, checkpoint)
    given |= {
        "strategy": job.parallel.data_strategy,
        "planning": _planning_of(job) if job.parallel.strategy == "auto" else None,
        "multiple_of": job.multiple_of,
        "pause_timeout_s": pause_s,
        "boundary_timeout_s": LAST_RESORT_TIMEOUTS * elastic.hang_timeout_s + pause_s,
        "publish_timeout_s": elastic.suspend_timeout_s + LAST_TRY_S,
        # Whose controller is stopped hears that from its silence alone, and looks now and then.
        "return_timeout_s": 1.5 * elastic.heartbeat_timeout_s + RETURN_S,
        "final_checkpoint": checkpoint.final,
        "beginning": _beginning_of(job),
        "checkpoint_every_s": None if checkpoint.every_s == "auto" else checkpoint.every_s,
        "checkpoint_auto": checkpoint.every_s == "auto",
    }
    if checkpoint.keep_for_h is not None:
        given["keep_last"] = max(CHECKPOINTS_KNOWN, checkpoint.keep_last)
    return Policy(**given).in_multiples()


def _beginning_of(job: Job) -> str:
    """What step 0 is made of: of ``model.path`` only the job's own code knows more."""
    if job.model.own:
        return "the script's own model"
    read = job.model.pretrained or job.model.weights
    return f"the weights at {read}" if read else "the seed"


def _planning_of(job: Job) -> Planning:
    from elastic_ft.controller.planning import planning_of  # imports torch, for seconds

    return planning_of(job)
