"""What is damaged, wrong or missing: a record, a checkpoint, a copy, user code, a joiner's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from tests.multiproc.harness import CORPUS, PATIENT, Once, make_job, run_job


def test_a_record_that_lags_behind_hides_no_checkpoint(tmp_path: Path) -> None:
    """As the power's loss may leave it where lines were not synced: the journal has the hole."""
    job = make_job("ddp", steps=6, workers=2)
    run_job(job, tmp_path).check()
    for name in ("steps.jsonl", "ledger.jsonl"):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        (tmp_path / name).write_bytes(b"".join(lines[:4]))
    run = run_job(make_job("ddp", steps=9, workers=2), tmp_path).check()
    (lost,) = run.all("record_incomplete")
    assert (lost["first_step"], lost["last_step"]) == (5, 6)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4, 7, 8, 9], run.story()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    tmp_path: Path, strategy: str
) -> None:
    """By whoever reads the damage: the others wait for no more than its word."""
    job = make_job(strategy, steps=8, workers=2, checkpoint={"every_steps": 4})
    run_job(job, tmp_path).check()
    shards = sorted((tmp_path / "checkpoints" / "data").glob("*/g*-s8/*.bin"))
    assert shards, "the newest checkpoint has shards"
    data = bytearray(shards[0].read_bytes())
    data[len(data) // 2] ^= 1
    shards[0].write_bytes(data)
    longer = make_job(strategy, steps=10, workers=2, checkpoint={"every_steps": 4})
    run = run_job(longer, tmp_path)
    assert run.result["status"] == "completed", run.story()
    (refused,) = run.all("checkpoint_refused")
    assert refused["step"] == 8
    assert "digest" in refused["reason"] or "differs" in refused["reason"], refused["reason"]
    later = [g for g in run.all("generation_formed") if g["seq"] > refused["seq"]]
    assert (later[0]["step"], later[0]["source"]) == (4, "checkpoint"), run.story()
    assert [line["step"] for line in run.steps] == list(range(1, 11)), run.story()


def test_a_damaged_copy_is_caught_by_its_digest(tmp_path: Path) -> None:
    """The buddy's copy of the dead worker's shard is damaged: the node's keeper has another."""
    faults = [
        PointFault("before_optimizer", "corrupt", rank=2, step=8),
        PointFault("before_optimizer", "kill", rank=1, step=8),
    ]
    job = make_job("fsdp", steps=12, checkpoint={"every_steps": 3})
    run = run_job(job, tmp_path, faults=faults).check()
    assert run.all("source_refused"), run.story()
    assert run.recoveries[0]["source"] == "keeper", run.story()
    assert not run.all("rolled_back"), run.story()
    whole = run_job(make_job("ddp", steps=12, workers=1), tmp_path / "one")
    run.same_losses_as(whole)


# --------------------------------------------------------------------------- user code


def test_an_exception_is_retried_in_place(tmp_path: Path) -> None:
    faults = [PointFault("forward", "raise", rank=1, step=5)]
    run = run_job(make_job("fsdp", steps=10), tmp_path, faults=faults).check()
    assert run.all("worker_raised"), run.story()
    assert run.recoveries[0]["world_after"] == 4, "nobody was killed for it"
    assert not run.all("worker_lost"), run.story()


@pytest.mark.parametrize("factory", ["raising", "diverging"])
def test_an_exception_that_comes_back_ends_the_job_by_its_name(
    tmp_path: Path, factory: str
) -> None:
    model = {"path": f"tests.multiproc.tiny:{factory}"}
    job = make_job("ddp", steps=10, workers=2, model=model, checkpoint={"every_steps": 2})
    run = run_job(job, tmp_path)
    assert run.result["status"] == "failed", run.story()
    named = {"raising": "ArithmeticError: on purpose", "diverging": "NonFiniteGradient"}[factory]
    assert named in run.result["reason"], run.result["reason"]
    assert "last good checkpoint: step 2" in run.result["reason"], run.result["reason"]


def test_a_step_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    """One rank's loss is NaN."""
    job = make_job("fsdp", steps=6, workers=2, optimizer={"skip_nonfinite": 1})
    run = run_job(job, tmp_path, faults=[PointFault("forward", "nan", rank=1, step=4)]).check()
    (skipped,) = run.all("step_skipped")
    assert (skipped["step"], len(run.all("generation_formed"))) == (4, 1), run.story()
    assert [line["step"] for line in run.steps if line.get("skipped")] == [4]


# ------------------------------------------------------------------------- a bad start


def test_workers_that_cannot_start_end_the_job(tmp_path: Path) -> None:
    job = make_job("ddp", workers=2, data={"path": "tests.multiproc.tiny:stillborn"})
    run = run_job(job, tmp_path)
    assert run.result["status"] == "failed", run.story()
    assert "ended before any could train, exited with code 3" in run.result["reason"]


def test_a_joiner_that_finds_no_data_is_done_without(tmp_path: Path) -> None:
    """Its node's mount is gone. The two that train go on; nobody is started there any more."""
    mark = tmp_path / "unmounted"
    data = {"path": "tests.multiproc.tiny:missing_after", "kwargs": {"mark": str(mark), **CORPUS}}
    job = make_job("ddp", steps=4000, workers=3, data=data, elastic={"min_workers": 2, **PATIENT})

    def lose_one(controller: Controller, host: LocalHost) -> None:
        mark.touch()
        host.kill_worker(max(controller.state.ranks))

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        lose(controller, line)
        if controller.state.unfit and line["world_size"] == 2:
            known.append(len(controller.state.unfit))
        if len(known) > 3 and known[-1] >= job.elastic.max_node_failures:
            controller.stop("it goes on without")

    known: list[int] = []
    lose = Once(4, lose_one)
    run = run_job(job, tmp_path / "run", on_step=on_step)
    assert run.result["status"] == "stopped", run.story()
    assert run.worlds() == [3, 2], run.story()
    refused = run.all("worker_refused")
    assert [line["times"] for line in refused] == [1, 2], run.story()
    assert all("no such mount" in line["reason"] for line in refused), run.story()
    (avoided,) = run.all("node_avoided")
    assert {avoided["node"]} == {line["node"] for line in refused}, run.story()


def test_a_fault_at_an_unknown_point_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown point 'lunch'"):
        PointFault("lunch")
