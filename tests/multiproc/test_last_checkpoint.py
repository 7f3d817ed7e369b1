"""A store that is away as a job ends: what the last steps have learnt is nowhere else."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.core import commands as cmd
from elastic_ft.faults import PointFault
from elastic_ft.observe.replay import check_replay
from elastic_ft.observe.run_folder import read_lines
from tests.multiproc.harness import ROOT, Run, make_job, run_job
from tests.multiproc.test_own_loop import make_job as own_job

STEPS, EARLIER = 3, 2


class AwayAtTheEnd:
    """The store takes all but the last step's objects: a file is where their folder is to be; for
    one rank alone, a folder where its file is. It comes back once that was told."""

    def __init__(self, folder: Path, comes_back: bool, rank: int | None = None) -> None:
        self.folder, self.comes_back, self._rank = folder, comes_back, rank
        self._there: Path | None = None
        self._is_back = False

    def watch(self, controller: Controller) -> None:
        if self._there is None:
            last = self.folder / "store/data" / controller.run_id / f"g1-s{STEPS}"
            last.parent.mkdir(parents=True)
            if self._rank is None:
                last.write_text("")
                self._there = last
            else:
                self._there = last / f"r{self._rank}-0.bin"
                (self._there / "full").mkdir(parents=True)
        elif self.comes_back and not self._is_back and self._is_told():
            self._is_back = True
            self._there.unlink() if self._rank is None else shutil.rmtree(self._there)

    def _is_told(self) -> bool:
        lines = read_lines(self.folder / "run/events.jsonl")
        return any(line["event"] == "checkpoint_warning" for line in lines)


def run_with(
    away: AwayAtTheEnd | None, folder: Path, keepers: bool = True, workers: int = 1
) -> Run:
    job = make_job(
        "ddp",
        steps=STEPS,
        workers=workers,
        checkpoint={"url": str(folder / "store"), "every_steps": EARLIER},
        elastic={
            "heartbeat_timeout_s": 10.0,
            "suspend_timeout_s": 60.0 if keepers else 1.0,
        },
    )
    watch = away.watch if away is not None else None
    return run_job(job, folder / "run", watch=watch, keepers=keepers)


def test_the_last_state_is_written_once_the_store_is_back(tmp_path: Path) -> None:
    """It was given up at once, and the job was complete with the checkpoint before it."""
    run = run_with(AwayAtTheEnd(tmp_path, comes_back=True), tmp_path).check()
    assert [line["step"] for line in run.all("checkpoint_committed")] == [EARLIER, STEPS]
    assert not run.all("checkpoint_abandoned"), run.story()
    (warned,) = run.all("checkpoint_warning")
    assert "is the last, and is written again and again" in warned["reason"]


def test_one_worker_of_two_can_not_reach_the_store(tmp_path: Path) -> None:
    run = run_with(AwayAtTheEnd(tmp_path, True, rank=1), tmp_path, workers=2).check()
    assert [line["step"] for line in run.all("checkpoint_committed")] == [EARLIER, STEPS]
    assert not run.all("checkpoint_abandoned"), run.story()
    assert len(run.all("checkpoint_warning")) == 1, run.story()
    assert [line["generation"] for line in run.all("generation_formed")] == [1], run.story()


def test_a_worker_is_killed_after_the_last_step(tmp_path: Path) -> None:
    """While the others write its checkpoint and the digest: the job ends as if it had not been."""
    job = make_job("fsdp", steps=STEPS, workers=3, elastic={"heartbeat_timeout_s": 10.0})
    fault = PointFault("finishing", rank=1)
    run = run_job(job, tmp_path / "run", faults=[fault]).check()
    assert run.result["faults_fired"] == [0] and run.all("worker_lost"), run.story()
    assert run.all("checkpoint_committed")[-1]["step"] == STEPS
    assert not any(r["steps_lost"] for r in run.result["recoveries"]), run.story()


@pytest.mark.soak
def test_a_job_without_it_is_not_complete_and_goes_on(tmp_path: Path) -> None:
    run = run_with(AwayAtTheEnd(tmp_path, comes_back=False), tmp_path, keepers=False)
    assert run.result["status"] == "suspended", run.story()
    assert "all 3 steps are committed, but not in a checkpoint" in run.result["reason"]
    again = run_with(None, tmp_path)
    assert again.result["status"] == "completed", again.story()
    assert again.all("checkpoint_committed")[-1]["step"] == STEPS


def test_a_loop_of_the_users_may_end_with_any_step(tmp_path: Path) -> None:
    """Its last step's upload was begun as any other's, and given up at once."""
    loop = {
        "script": str(ROOT / "tests/multiproc/own_last.py"),
        "arguments": [str(tmp_path), str(STEPS)],
    }
    checkpoint = {"url": str(tmp_path / "store"), "every_steps": STEPS}
    job = own_job(tmp_path, workers=1, loop=loop, checkpoint=checkpoint)
    away = AwayAtTheEnd(tmp_path, comes_back=True)

    def watch(controller: Controller) -> None:
        away.watch(controller)
        events = {line["event"] for line in read_lines(tmp_path / "run/events.jsonl")}
        if events & {"checkpoint_warning", "checkpoint_abandoned"}:
            (tmp_path / "end").touch()

    run = run_job(job, tmp_path / "run", watch=watch)
    assert run.result["status"] == "completed", run.story()
    assert [line["step"] for line in run.all("checkpoint_committed")] == [STEPS]
    assert not run.all("checkpoint_abandoned"), run.story()
    (warned,) = run.all("checkpoint_warning")
    assert "is the last so far, and is written again and again" in warned["reason"]


class DamagedAtTheEnd:
    """A bit of the last step's shards is flipped before its manifest is written, and they are read
    back once the end of the job is decided."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._decided = folder, threading.Event()
        self._is_set = False

    def watch(self, controller: Controller) -> None:
        if not self._is_set:
            self._is_set = True
            publisher: Any = controller._publisher
            commit, reads_back = publisher.commit, publisher._reads_back
            publisher.commit = lambda command, *more: (
                self._damage(command),
                commit(command, *more),
            )
            publisher._reads_back = lambda newest, ref: (
                newest.step == STEPS and self._decided.wait(),
                reads_back(newest, ref),
            )[1]
        lines = read_lines(self.folder / "run/events.jsonl")
        if any(line["event"] == "checkpoint_committed" for line in lines):
            (self.folder / "end").touch()
        if controller.state.phase == "ended":
            self._decided.set()

    def _damage(self, command: cmd.CommitCheckpoint) -> None:
        if command.step == STEPS:
            for path in (self.folder / "store/data").glob(f"*/g1-s{STEPS}/*.bin"):
                body = bytearray(path.read_bytes())
                body[0] ^= 1
                path.write_bytes(body)


def test_no_job_is_complete_with_a_checkpoint_that_is_found_damaged_at_its_end(
    tmp_path: Path,
) -> None:
    """That was a line of the journal, after the one that said that the job was complete."""
    loop = {
        "script": str(ROOT / "tests/multiproc/own_last.py"),
        "arguments": [str(tmp_path), str(STEPS)],
    }
    checkpoint = {"url": str(tmp_path / "store"), "every_steps": STEPS}
    job = own_job(tmp_path, workers=1, loop=loop, checkpoint=checkpoint)
    run = run_job(job, tmp_path / "run", watch=DamagedAtTheEnd(tmp_path).watch)
    assert run.all("checkpoint_refused"), run.story()
    assert run.result["status"] == "suspended", run.result
    assert run.result["reason"].startswith("all 3 steps are committed, but not in a checkpoint: ")
    assert run.result["reason"].endswith("; there is no checkpoint")
    assert run.result["checkpoints"] == []
    (told,) = run.all("finished")
    assert (told["status"], told["reason"]) == (run.result["status"], run.result["reason"])
    assert check_replay(run.path).difference == ""
