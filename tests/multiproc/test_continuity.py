"""A run goes on under the terms of its checkpoint, or says that it does not (I2)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.core.invariants import Expected, check_run
from elastic_ft.errors import ConfigError
from elastic_ft.observe.alive import NAME as ALIVE
from tests.multiproc.harness import dataset_size, make_job, run_job

STEPS = 3
MORE_TOKENS = {"max_tokens": 41_000}
accepting = partial(Controller, accept_changes=True)


def written(folder: Path) -> dict[Path, bytes]:
    """All but the sign of life."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ALIVE)
    return {path: path.read_bytes() for path in files}


def test_other_terms_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """Its checkpoint is of 3 steps of 8 samples: step 4 of 16 would begin with sample 48."""
    first = run_job(make_job(steps=STEPS, workers=1), tmp_path).check()
    before = written(tmp_path)
    other = make_job(steps=5, workers=1, batch={"global_batch_size": 16}, data=MORE_TOKENS)
    with pytest.raises(ConfigError) as refused:
        run_job(other, tmp_path)
    assert str(refused.value).startswith(
        "batch.global_batch_size was 8, is 16: samples 24 to 47 of the data order would be skipped"
    )
    assert written(tmp_path) == before

    asked = run_job(other, tmp_path, controller=accepting)
    assert asked.result["status"] == "completed", asked.story()
    told = [line["changes"] for line in asked.all("changes_accepted")]
    assert told[0] == {"batch.global_batch_size": [8, 16]}
    assert told[1]["data.samples"] == [dataset_size(first.job), dataset_size(other)]
    assert asked.all("job_changed")[0]["changes"]["steps"] == [STEPS, 5]
    expected = Expected(
        seed=3, dataset_size=dataset_size(other), global_batch_size=16, steps=5, status="completed"
    )
    found = check_run(asked.events, asked.steps, asked.ledger, asked.result, expected)
    assert not found, "\n".join([asked.story(), *map(str, found)])

    again = run_job(make_job(steps=6, workers=1, batch={"global_batch_size": 16}), tmp_path)
    assert again.result["status"] == "failed", again.story()
    assert "data.samples was" in again.result["reason"]


def test_a_long_evaluation_and_a_long_digest_are_no_hang(tmp_path: Path) -> None:
    """Each takes longer than ``hang_timeout_s``, in parts that don't."""
    kwargs = {"evaluate_s": 0.2, "digest_s": 0.05}
    job = make_job(
        steps=1,
        workers=1,
        model={"path": "tests.multiproc.slow:slow_at_the_end", "kwargs": kwargs},
        data={"eval_every_steps": 1, "eval_samples": 16},
        batch={"global_batch_size": 1},
        elastic={"hang_timeout_s": 2, "heartbeat_timeout_s": 10},
    )
    run = run_job(job, tmp_path).check()
    assert run.all("evaluated"), run.story()
    assert len(run.all("generation_formed")) == 1, run.story()
    assert len(run.result["state_digest"]) == 32
