"""Every layout trains as one process does, and a job moves from one to another while it runs.

The losses of one process are data, golden/layouts.json; ``python -m tests.multiproc.test_layouts``
makes them. Each layout gets the same samples, in micro-batches that do not divide evenly.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job
from elastic_ft.runtime.faults import Fault
from tests.multiproc.harness import Gate, Run, make_job, run_job

GOLDEN = Path(__file__).parent / "golden" / "layouts.json"
STEPS = 20
GOLDEN_TOLERANCE = 1e-5  # relative
MODEL = {
    "preset": "decoder-1m",
    "kwargs": {
        "dim": 16,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 32,
        "vocab_size": 101,
    },
}
BATCH = {"global_batch_size": 9}  # of micro-batches of one sample: 5 and 4 for two data ranks

# name -> (data-parallel strategy, workers, parallel section)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp1-tp2": ("ddp", 2, {"tp": 2}),
    "ddp2-tp2": ("ddp", 4, {"tp": 2}),
    "fsdp2-tp2": ("fsdp", 4, {"tp": 2}),
    "hsdp2x2-tp2": ("hsdp", 8, {"tp": 2}),
    "pp2-ddp1 gpipe": ("ddp", 2, {"pp": 2, "schedule": "gpipe"}),
    "pp2-ddp1 1f1b": ("ddp", 2, {"pp": 2}),
    "pp2-ddp1 interleaved1f1b": ("ddp", 2, {"pp": 2, "schedule": "interleaved1f1b"}),
    "pp2-ddp1 zero_bubble": ("ddp", 2, {"pp": 2, "schedule": "zero_bubble"}),
    "pp3-ddp1 1f1b": ("ddp", 3, {"pp": 3}),
    "pp2-ddp2 1f1b": ("ddp", 4, {"pp": 2}),
    "pp2-fsdp2 1f1b": ("fsdp", 4, {"pp": 2}),
    "pp2-fsdp2 interleaved1f1b": ("fsdp", 4, {"pp": 2, "schedule": "interleaved1f1b"}),
    "pp2-fsdp2 zero_bubble": ("fsdp", 4, {"pp": 2, "schedule": "zero_bubble"}),
    "pp2-ddp1-tp2 1f1b": ("ddp", 4, {"pp": 2, "tp": 2}),
    "pp2-ddp2-tp2 1f1b": ("ddp", 8, {"pp": 2, "tp": 2}),
    "pp2-fsdp2-tp2 1f1b": ("fsdp", 8, {"pp": 2, "tp": 2}),
}
# Killed at the end, 4 workers become 3: what the layout of the 4 held, that of the 3 must hold.
MOVED = ["ddp2-tp2", "fsdp2-tp2", "pp2-ddp2 1f1b", "pp2-fsdp2 1f1b", "pp2-ddp1-tp2 1f1b"]
DATA = {"path": "tests.multiproc.tiny:counted", "kwargs": {}}


def job_of(name: str, **sections: Any) -> Job:
    strategy, workers, parallel = LAYOUTS[name]
    values = {"steps": STEPS, "workers": workers, "model": MODEL, "batch": BATCH, "data": DATA}
    values |= sections
    parallel = parallel | {"shard_size": 2} if strategy == "hsdp" else parallel
    return make_job(strategy, parallel=parallel, **values)


def one_process(out: Path) -> Run:
    values = {"steps": STEPS, "workers": 1, "model": MODEL, "batch": BATCH, "data": DATA}
    return run_job(make_job("ddp", **values), out).check()


@functools.cache
def golden() -> dict[str, list[float]]:
    return json.loads(GOLDEN.read_text())


def assert_golden(run: Run, tolerance: float) -> None:
    for key, expected in golden().items():
        found = [line[key] for line in run.steps]
        assert found == pytest.approx(expected, rel=tolerance, abs=0), f"{key}\n{run.story()}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    run = run_job(job_of(name), tmp_path).check()
    assert [g["layout"] for g in run.all("generation_formed")] == [name.split()[0]]
    assert_golden(run, GOLDEN_TOLERANCE)


@pytest.mark.parametrize("name", MOVED)
def test_the_state_moves_bit_by_bit(name: str, tmp_path: Path) -> None:
    """A worker is killed when all have finished: the survivors lay the same step out anew."""
    whole = run_job(job_of(name, steps=4), tmp_path / "whole").check()
    kill = Fault("finishing", "kill", rank=2, world=4)
    moved = run_job(job_of(name, steps=4), tmp_path / "moved", faults=[kill]).check()
    assert moved.recoveries, moved.story()
    first = moved.recoveries[0]
    assert (first["steps_lost"], first["steps_redone"]) == (0, 0), moved.story()
    assert first["survivors_kept_pid"]
    assert moved.result["state_digest"] == whole.result["state_digest"], moved.story()


@pytest.mark.parametrize("name", MOVED)
def test_moves_between_layouts(name: str, tmp_path: Path) -> None:
    """4 workers, one killed inside a step, 3 in another layout, and back."""
    gate = Gate(tmp_path / "gate")
    data = {"path": "tests.multiproc.tiny:counted", "kwargs": {"gate": str(gate.path)}}
    run = run_job(
        job_of(name, data=data),
        tmp_path / "run",
        faults=[Fault("backward", "kill", rank=1, world=4, step=6)],
        watch=gate,
    ).check()
    layouts = [g["layout"] for g in run.all("generation_formed")]
    assert layouts[-2:] == [f"{LAYOUTS[name][0]}3", name.split()[0]], run.story()
    assert all(r["steps_lost"] == 0 and r["survivors_kept_pid"] for r in run.recoveries)
    assert_golden(run, 1e-4)


def make_golden() -> None:
    with tempfile.TemporaryDirectory() as out:
        run = one_process(Path(out))
    found = {key: [line[key] for line in run.steps] for key in ("loss", "grad_norm")}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()
