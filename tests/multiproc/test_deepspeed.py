"""DeepSpeed's ZeRO stages: an optimizer on the CPU, checkpoints to and from FSDP2.

Their losses are in test_layouts.py, faults in test_moves.py, leaks in test_generations.py.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job
from tests.multiproc.harness import Run, run_job
from tests.multiproc.harness import make_job as make_any_job

STEPS = 20
EXACT = 1e-5  # relative, of fp32 losses
HEARTBEAT = {"heartbeat_timeout_s": 10}  # kills are noticed without it, and imports take seconds


def make_job(*, workers: int, **sections: Any) -> Job:
    elastic = {"min_workers": min(2, workers), "max_workers": workers, "gather_s": 60}
    return make_any_job(workers=workers, elastic=elastic | HEARTBEAT, **sections)


def deepspeed(stage: int, **others: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage} | others


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The native engine's."""
    return run_job(make_job(workers=1, steps=STEPS), tmp_path_factory.mktemp("one") / "run").check()


def assert_same_losses(run: Run, other: Run) -> None:
    mine, others = run.losses(), other.losses()
    assert mine.keys() == others.keys() == set(range(1, STEPS + 1))
    for step, loss in mine.items():
        assert abs(loss - others[step]) <= EXACT * abs(others[step]), (step, loss, others[step])


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_on_the_cpu_equals_one_process(
    tmp_path: Path, one_process: Run, stage: int
) -> None:
    parallel = deepspeed(stage, offload_optimizer=True)
    run = run_job(make_job(workers=2, steps=STEPS, parallel=parallel), tmp_path / "run").check()
    assert_same_losses(run, one_process)


Saved = Callable[[str], Run]
BEFORE = {"fsdp": {"strategy": "fsdp"}, "zero2": deepspeed(2), "zero3": deepspeed(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What three workers have trained, with its checkpoint; each engine once."""

    @functools.cache
    def run(before: str) -> Run:
        job = make_job(workers=3, steps=8, parallel=BEFORE[before])
        return run_job(job, tmp_path_factory.mktemp(before) / "run").check()

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp", deepspeed(3)),
        ("fsdp", deepspeed(1)),
        ("zero2", {"strategy": "fsdp"}),
        ("zero3", {"strategy": "fsdp"}),
        ("zero3", deepspeed(0)),
    ],
    ids=["fsdp-zero3", "fsdp-zero1", "zero2-fsdp", "zero3-fsdp", "zero3-zero0"],
)
def test_a_checkpoint_of_one_engine_is_restored_in_the_other(
    tmp_path: Path, saved: Saved, before: str, after: dict[str, Any]
) -> None:
    """At another world size. It was the last step's: the state restored is the state there is."""
    first, checkpoints = saved(before), tmp_path / "checkpoints"
    shutil.copytree(first.path / "checkpoints", checkpoints)
    job = make_job(workers=2, steps=8, parallel=after, checkpoint={"url": str(checkpoints)})
    resumed = run_job(job, tmp_path / "run")
    assert resumed.result["status"] == "completed", resumed.story()
    assert not resumed.losses(), resumed.story()
    assert resumed.result["state_digest"] == first.result["state_digest"], resumed.story()
