"""DeepSpeed's ZeRO stages: an optimizer on the CPU, checkpoints to and from FSDP2.

Their losses are in test_layouts.py, faults in test_moves.py, leaks in test_generations.py.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"strategy": "fsdp"}, deepspeed(3)),
        ({"strategy": "fsdp"}, deepspeed(1)),
        (deepspeed(2), {"strategy": "fsdp"}),
        (deepspeed(3), {"strategy": "fsdp"}),
        (deepspeed(3), deepspeed(0)),
    ],
    ids=["fsdp-zero3", "fsdp-zero1", "zero2-fsdp", "zero3-fsdp", "zero3-zero0"],
)
def test_a_checkpoint_of_one_engine_is_restored_in_the_other(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """At another world size. It was the last step's: the state restored is the state there is."""
    same: Any = {"checkpoint": {"url": str(tmp_path / "checkpoints")}}
    saved = run_job(make_job(workers=3, steps=8, parallel=before, **same), tmp_path / "a").check()
    resumed = run_job(make_job(workers=2, steps=8, parallel=after, **same), tmp_path / "b")
    assert resumed.result["status"] == "completed", resumed.story()
    assert not resumed.losses(), resumed.story()
    assert resumed.result["state_digest"] == saved.result["state_digest"], resumed.story()
