"""What a loop of one's own does between two steps: it may take long, and lose a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job, parse_job
from tests.multiproc.harness import PATIENT, ROOT, Run, run_job

STEPS = 5


def make_job(out: Path, what: str, workers: int = 2, strategy: str = "ddp", **elastic: Any) -> Job:
    script = ROOT / "tests/multiproc/own_between.py"
    (out / "told").mkdir(parents=True)
    values = {
        "name": "between",
        "steps": STEPS,
        "loop": {
            "script": str(script),
            "arguments": [str(out / "told"), str(out / "run"), what],
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "snapshot": {"every_steps": 1},
        "parallel": {"strategy": strategy},
        "elastic": {"min_workers": workers, "max_workers": workers, "gather_s": 60}
        | PATIENT
        | {"join_batch_s": 0.1}
        | elastic,
    }
    return parse_job(values)


def told(out: Path) -> list[list[dict[str, Any]]]:
    files = sorted((out / "told").glob("*.jsonl"))
    return [[json.loads(line) for line in f.read_text().splitlines()] for f in files]


def check(found: Run) -> None:
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, STEPS + 1)], found.story()


def test_an_export_that_takes_long_is_no_hang(tmp_path: Path) -> None:
    """It is told of once a hang timeout has gone by, which is what this one waits for."""
    job = make_job(tmp_path, "export", hang_timeout_s=4, heartbeat_timeout_s=8)
    found = run_job(job, tmp_path / "run")
    check(found)
    assert found.worlds() == [2], found.story()
    (line,) = found.all("between_steps")
    assert "after 32 s" in line["reason"]
    assert [
        [e["exported_by"] for e in lines if "exported_by" in e] for lines in told(tmp_path)
    ] == [
        [2.0],
        [2.0],
    ]


def test_who_comes_in_for_one_that_was_lost_in_an_evaluation_waits(tmp_path: Path) -> None:
    """It knows nothing of that: the survivors make it again by themselves, then all step."""
    job = make_job(tmp_path, "evaluation", workers=3)
    found = run_job(job, tmp_path / "run")
    check(found)
    assert (tmp_path / "told" / "died").exists()
    assert found.worlds() == [3, 3], found.story()
    lines = told(tmp_path)
    assert sorted([line["step"] for line in each] for each in lines) == [
        [1, 2],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5],
        [4, 5],
    ]
    for line in (line for each in lines for line in each):
        assert line["mean"] == pytest.approx(line["alone"], rel=1e-5)
        assert line["world"] == 3, "of the step, whoever evaluates"
        assert line["seen"] == line["step"], "what the others made of it is its, too"
    evaluated = [line["step"] for line in found.all("evaluated")]
    assert sorted(evaluated) == [0, 1, 2, 3, 3, 4, 5], "before its first batch, by itself"
    (noted,) = [line for line in found.all("logged") if line["step"] == 3]
    (mean,) = {line["mean"] for each in lines for line in each if line["step"] == 3}
    assert noted["values"] == {"mean": mean}
