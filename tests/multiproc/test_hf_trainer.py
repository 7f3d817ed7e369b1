"""Hugging Face's trainer on plain processes, through losses and joiners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job, parse_job
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, ROOT, Gate, Run, run_job

pytest.importorskip("accelerate", reason="pip install 'elastic-ft[huggingface]'")

STEPS, CLOSE = 12, 1e-5  # relative
SCRIPT, BEST = "tests/multiproc/hf_train.py", "tests/multiproc/hf_best.py"
TOLD = "told"
OWN = ("first", "rare", "num_tokens")  # what the trainer keeps of micro-batches, as TRL's do


def make_job(
    out: Path, workers: int = 3, strategy: str = "ddp", dies: str = "", min_workers: int = 2
) -> Job:
    told = out / TOLD
    told.mkdir(parents=True)
    elastic = {"min_workers": min_workers, "max_workers": workers, "gather_s": 60}
    values = {
        "name": "hf",
        "audit": True,
        "loop": {"script": str(ROOT / SCRIPT), "arguments": [str(told), "elastic", dies]},
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "snapshot": {"every_steps": 1},
        "parallel": {"strategy": strategy},
        "elastic": elastic | PATIENT | {"join_batch_s": 0.1},
    }
    return parse_job(values)


def told(out: Path) -> dict[int, list[dict[str, Any]]]:
    files = sorted((out / TOLD).glob("*.jsonl"))
    return {int(f.stem): [json.loads(x) for x in f.read_text().splitlines()] for f in files}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the stock trainer tells, in one process."""
    return told_by_stock(tmp_path_factory.mktemp("stock"), SCRIPT)


def told_by_stock(out: Path, script: str) -> list[dict[str, Any]]:
    (out / TOLD).mkdir()
    command = [sys.executable, script, str(out / TOLD), "stock"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (lines,) = told(out).values()
    return lines


def logged(lines: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, float]]:
    """By step, and whether it is of training or of an evaluation."""
    entries = [line for line in lines if "logged" in line]
    return {(e["at"], "loss" if "loss" in e["logged"] else "eval"): e["logged"] for e in entries}


def check(out: Path, found: Run, stock: list[dict[str, Any]]) -> None:
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, STEPS + 1)], found.story()
    expected = logged(stock)
    for line in found.steps:  # once each, whoever was lost
        assert line["logged"].pop("epoch") == expected[line["step"], "loss"]["epoch"]
        for key, value in line["logged"].items():
            if key in (*OWN, "loss", "grad_norm", "learning_rate"):
                alone = expected[line["step"], "loss"][key]
                assert value == pytest.approx(alone, rel=CLOSE, abs=1e-9), (line, alone)
    assert found.ledger is not None
    ids = [sample for line in found.ledger for sample in line["samples"]]
    assert sorted(ids) == [*range(STEPS * 16)], "each sample of each epoch, once"
    for lines in told(out).values():
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == [*range(steps[0], steps[0] + len(steps))], "once each, in order"
        for key, values in logged(lines).items():
            for name, value in values.items():
                alone = expected[key][name]
                assert value == pytest.approx(alone, rel=CLOSE, abs=1e-9), (key, name)
    ends = [lines[-1] for lines in told(out).values() if "after" in lines[-1]]
    for end in ends:
        if found.job.parallel.strategy == "ddp":  # else it is the sum of this rank's parts
            assert end["after"] == pytest.approx(stock[-1]["after"], rel=CLOSE)
        assert end["losses"] == pytest.approx(stock[-1]["losses"], rel=CLOSE)
    exported = {path.name for path in (out / TOLD / "exported").iterdir()}
    assert exported == {"checkpoint-6", "checkpoint-12"}


def survivors(out: Path) -> list[int]:
    """Processes that were there from the first step to the last."""
    lines = told(out).items()
    return [pid for pid, said in lines if said[0].get("step") == 1 and "after" in said[-1]]


@pytest.mark.parametrize(
    ("strategy", "point", "step"),
    [
        ("ddp", "backward", 5),
        pytest.param("ddp", "before_optimizer", 4, marks=pytest.mark.soak),
        pytest.param("ddp", "after_optimizer", 6, marks=pytest.mark.soak),
        pytest.param("fsdp", "forward", 5, marks=pytest.mark.soak),
    ],
)
def test_a_killed_worker_costs_the_trainer_nothing(
    tmp_path: Path, stock: list[dict[str, Any]], strategy: str, point: str, step: int
) -> None:
    fault = PointFault(point, rank=1, step=step)
    watch = Gate(tmp_path / TOLD / "gate")
    job = make_job(tmp_path, strategy=strategy)
    found = run_job(job, tmp_path / "run", faults=(fault,), watch=watch)
    check(tmp_path, found, stock)
    assert found.worlds()[0] == 3 and found.worlds()[-1] == 3, found.story()
    assert len(survivors(tmp_path)) == 2, found.story()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("where", "min_workers"), [("evaluation", 2), ("evaluation", 3), ("callback", 2)]
)
def test_a_worker_killed_between_two_steps_costs_nothing(
    tmp_path: Path, stock: list[dict[str, Any]], where: str, min_workers: int
) -> None:
    """With three at least, another is in its place before the others evaluate again."""
    watch = Gate(tmp_path / TOLD / "gate")
    job = make_job(tmp_path, dies=where, min_workers=min_workers)
    found = run_job(job, tmp_path / "run", watch=watch, deadline_s=200)  # two starts, one by one
    assert (tmp_path / TOLD / "died").exists()
    check(tmp_path, found, stock)
    assert found.worlds()[-1] == 3, found.story()
    assert len(survivors(tmp_path)) == 2, found.story()


@pytest.fixture(scope="module")
def stock_best(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (line,) = told_by_stock(tmp_path_factory.mktemp("stock-best"), BEST)
    return line


@pytest.mark.parametrize("kind", ["elastic", "apart"])
def test_the_best_model_is_there_in_the_end(
    tmp_path: Path, stock_best: dict[str, Any], kind: str
) -> None:
    """On each rank, whoever wrote it, and whoever can see it, after an early stop that all come to
    together."""
    stock, out = stock_best, tmp_path / kind
    assert stock["best"] != f"checkpoint-{stock['last']}", stock
    job = make_job(out)
    loop = {"script": str(ROOT / BEST), "arguments": (str(out / TOLD), kind)}
    job = job.model_copy(update={"loop": job.loop.model_copy(update=loop)})  # type: ignore[union-attr]
    faults = [PointFault("backward", rank=0, step=3)] * (kind == "elastic")
    found = run_job(job, out / "run", faults=faults, watch=Gate(out / TOLD / "gate"))
    assert found.result["status"] == "completed", found.story()
    assert len(found.steps) == stock["last"], found.story()
    ends = [lines[-1] for lines in told(out).values()]
    assert len(ends) == 3, found.story()
    for end in ends:
        assert (end["last"], end["best"]) == (stock["last"], stock["best"])
        assert end["total"] == pytest.approx(stock["total"], rel=CLOSE)
        assert end["loss"] == pytest.approx(stock["loss"], rel=CLOSE)
