"""A training loop of one's own, on plain processes, through losses and joiners."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ft.config import Job, parse_job
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, ROOT, Gate, Run, run_job

STEPS = 12
CLOSE = 1e-7  # relative
GONE_S = 10.0  # for what a process has started to end after it


def make_job(out: Path, *, workers: int = 3, strategy: str = "ddp", **sections: Any) -> Job:
    told = out / "told"
    told.mkdir(parents=True)
    script = ROOT / "tests/multiproc/own_train.py"
    loop = {"script": str(script), "arguments": [str(told), str(STEPS), "5"]}
    elastic = {"min_workers": min(2, workers), "max_workers": workers, "gather_s": 60}
    values = {
        "name": "own",
        "seed": 3,
        "audit": True,
        "loop": loop,
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "snapshot": {"every_steps": 1},
        "parallel": {"strategy": strategy} | ({"shard_size": 2} if strategy == "hsdp" else {}),
        "elastic": elastic | PATIENT | {"join_batch_s": 0.1},
    }
    return parse_job(values | sections)


def told(out: Path) -> dict[int, list[dict[str, Any]]]:
    files = sorted((out / "told").glob("*.jsonl"))
    return {int(f.stem): [json.loads(x) for x in f.read_text().splitlines()] for f in files}


def run(out: Path, job: Job, faults: tuple[PointFault, ...] = ()) -> Run:
    return run_job(job, out / "run", faults=faults, watch=Gate(out / "told" / "gate"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    out = tmp_path_factory.mktemp("undisturbed")
    found = run(out, make_job(out, workers=1))
    assert found.result["status"] == "completed", found.story()
    (lines,) = told(out).values()
    return {line["step"]: line for line in lines if "step" in line}


def check_steps(out: Path, found: Run, undisturbed: dict[int, dict[str, Any]]) -> None:
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, STEPS + 1)], found.story()
    for line in found.steps:
        assert line["loss"] == pytest.approx(undisturbed[line["step"]]["loss"], rel=CLOSE)
        assert line["logged"] == {"own": 2 * line["step"]}
        (sure,) = line["metrics"].values()
        assert sure == pytest.approx(undisturbed[line["step"]]["sure"], rel=CLOSE)
    by_step: dict[int, set[str]] = {}
    for lines in told(out).values():
        steps = [line["step"] for line in lines if "step" in line]
        if not steps:  # it joined at the end, or died at once
            continue
        if found.job.parallel.strategy != "ddp":  # a step without a second copy is made again
            steps = sorted(set(steps))
        assert steps == [*range(steps[0], steps[0] + len(steps))], "once each, in order"
        for line in lines:
            if "step" in line:
                alike = {k: v for k, v in line.items() if k not in ("rank", "world")}
                by_step.setdefault(line["step"], set()).add(json.dumps(alike, sort_keys=True))
    for step, states in by_step.items():
        if found.job.parallel.strategy == "ddp":
            assert len(states) == 1, f"ranks differ after step {step}: {states}"
        alone = undisturbed[step]
        for seen in map(json.loads, states):
            for key in ("updates", "rates"):
                assert seen[key] == alone[key]
            for key in ("ema", "parameters", "norm", "history", "sure"):
                assert seen[key] == pytest.approx(alone[key], rel=1e-5)


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        ("ddp", "backward"),
        ("ddp", "before_optimizer"),
        ("fsdp", "forward"),
        pytest.param("fsdp", "before_optimizer", marks=SOAK),
        pytest.param("hsdp", "backward", marks=SOAK),
        pytest.param("ddp", "forward", marks=SOAK),
        pytest.param("ddp", "after_optimizer", marks=SOAK),
        pytest.param("ddp", "data", marks=SOAK),
    ],
)
def test_a_killed_worker_costs_no_step(
    tmp_path: Path, undisturbed: dict[int, dict[str, Any]], strategy: str, point: str
) -> None:
    """The survivors go on in their processes, and its replacement has all that they have."""
    job = make_job(tmp_path, strategy=strategy)
    found = run(tmp_path, job, (PointFault(point, rank=1, step=5),))
    check_steps(tmp_path, found, undisturbed)
    assert found.worlds()[0] == 3 and found.worlds()[-1] == 3, found.story()
    everyone = [lines for lines in told(tmp_path).values() if len(lines) > 1]
    first = [lines for lines in everyone if lines[0]["step"] == 1]
    ended = [lines for lines in everyone if lines[-1].get("after")]
    assert len([lines for lines in first if lines in ended]) == 2, found.story()
    joined = [lines for lines in ended if lines not in first]
    assert len(joined) == 1, found.story()


def test_processes_that_read_outlive_new_deals(
    tmp_path: Path, undisturbed: dict[int, dict[str, Any]]
) -> None:
    """Those of survivors are the same to the end; a killed worker's end with it."""
    job = told_more(make_job(tmp_path), "processes")
    found = run(tmp_path, job, (PointFault("backward", rank=1, step=5),))
    check_steps(tmp_path, found, undisturbed)
    assert found.worlds()[0] == 3 and found.worlds()[-1] == 3, found.story()
    lines = {f.stem: f.read_text().split("\n")[:-1] for f in (tmp_path / "told").glob("*.readers")}
    whole = [line for line in lines.values() if len(line) == 2]
    assert len(lines) >= 4 and len(whole) == 3, "of all but the killed one"
    for first, last in whole:
        assert first == last and len(first.split()) == 2
    left = {int(pid) for line in lines.values() for pid in line[0].split()}
    deadline_s, pause = time.monotonic() + GONE_S, threading.Event()
    while left := {pid for pid in left if is_there(pid)}:
        assert time.monotonic() < deadline_s, left
        pause.wait(0.05)


def is_there(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def told_more(job: Job, argument: str) -> Job:
    """Its script is told it, too."""
    assert job.loop is not None
    loop = job.loop.model_copy(update={"arguments": (*job.loop.arguments, argument)})
    return job.model_copy(update={"loop": loop})


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=SOAK)])
def test_a_stream_goes_on_where_it_was(tmp_path: Path, strategy: str) -> None:
    """For the survivors, and for who joins: as in a world of one, also past its end."""
    alone, out = tmp_path / "alone", tmp_path / "lost"
    found = {}
    for folder, workers in ((alone, 1), (out, 3)):
        job = told_more(make_job(folder, workers=workers, strategy=strategy), "stream")
        faults = (PointFault("backward", rank=1, step=5),) if workers > 1 else ()
        found[folder] = run(folder, job, faults)
    (lines,) = told(alone).values()
    check_steps(out, found[out], {line["step"]: line for line in lines if "step" in line})
    assert found[out].worlds()[0] == 3 and found[out].worlds()[-1] == 3, found[out].story()
    read = {line["step"]: line["samples"] for line in found[out].ledger}
    assert read == {step: [*range(16 * (step - 1), 16 * step)] for step in range(1, STEPS + 1)}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_kills_anywhere_cost_no_step(
    tmp_path: Path, undisturbed: dict[int, dict[str, Any]], seed: int
) -> None:
    """Two workers, one after the other, at any point of any step."""
    chance = random.Random(seed)
    points = ("data", "forward", "backward", "reduce", "before_optimizer", "after_optimizer")
    steps = sorted(chance.sample(range(1, STEPS - 2), 2))
    first, second = (
        PointFault(chance.choice(points), rank=chance.randrange(2), step=step) for step in steps
    )
    job = make_job(tmp_path, strategy=chance.choice(("ddp", "fsdp", "hsdp")))
    print(f"seed {seed}: {job.parallel.strategy}, {first}, {second}")
    found = run(tmp_path, job, (first, replace(second, after=0)))
    check_steps(tmp_path, found, undisturbed)


def test_a_step_runs_as_its_script_does(tmp_path: Path) -> None:
    """Default device, autocast and whether there are gradients are each thread's own, and a step is
    made in another than the script's; what is no user's code keeps to the CPU where it must."""
    script = ROOT / "tests/multiproc/own_here.py"
    loop = {"script": str(script), "arguments": [str(tmp_path)]}
    found = run_job(make_job(tmp_path, workers=2, loop=loop, steps=4), tmp_path / "run")
    assert found.result["status"] == "completed", found.story()
    lines = [f.read_text().splitlines() for f in tmp_path.iterdir() if f.name.isdigit()]
    assert len(lines) == 2, found.story()
    here = "meta True torch.float16"
    expected = {f"step {here} True", f"evaluate {here} False", f"together {here} False"}
    assert set(itertools.chain(*lines)) == expected
