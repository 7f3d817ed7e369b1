"""What a controller finds in its run folder before it starts anyone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ft.cli.run import COMPLETED, EndOfRun, conclude
from elastic_ft.controller.controller import Controller
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import alive, handover
from elastic_ft.observe.alive import Alive
from elastic_ft.observe.handover import await_handover
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.storage import owners, shards
from elastic_ft.storage.store import open_store
from tests.multiproc.harness import make_job
from tests.storage.published import commit
from tests.waiting import until


class Idle(LocalHost):
    """Of a job that is not to start."""

    def start(self, *args: Any) -> None:
        raise AssertionError("nothing is to be started")


def controller(folder: Path, steps: int) -> Controller:
    job, run = make_job(steps=steps), RunFolder(str(folder))
    return Controller(job, Idle({}), run, str(folder / "checkpoints"))


def publish(folder: Path, step: int) -> None:
    store = open_store(str(folder / "checkpoints"))
    box = Box((0,), (4,))
    pieces = [("w", box, "float32", memoryview(np.zeros(4, np.float32)).cast("B"))]
    prefix = shards.attempt_prefix("run", 1, step)
    entries = tuple(
        ShardEntry.from_dict(item) for item in shards.write_shards(store, prefix, 0, pieces)
    )
    manifest = Manifest(
        job="tiny",
        run="run",
        step=step,
        generation=1,
        nonce="nonce",
        layout="ddp1",
        created_at_s=time.time(),
        tensors={"w": TensorSpec("float32", (4,))},
        entries=entries,
    )
    commit(store, manifest, 2)


def test_a_complete_job_is_not_run_again(tmp_path: Path) -> None:
    """D7: its workers were started, and its result overwritten with nothing."""
    before = {"status": "completed", "steps": 7, "final_loss": 0.5, "ended_at_s": 1.0}
    (tmp_path / "result.json").write_text(json.dumps(before))
    assert controller(tmp_path, steps=7).run() == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == before


def test_fewer_steps_than_there_are_is_refused(tmp_path: Path) -> None:
    """D6: it said "completed: 1372 steps" of a job of 900."""
    publish(tmp_path, 1372)
    with pytest.raises(ConfigError, match=r"^steps: 900 is below step 1372, from which"):
        controller(tmp_path, steps=900).run()
    assert not (tmp_path / "controller.json").exists(), "nothing was cut off: nobody is to restart"
    assert not (tmp_path / "result.json").exists()


def test_a_second_start_asks_the_first_to_hand_over(tmp_path: Path) -> None:
    """Of a job that has no worker yet; with workers: tests/multiproc/test_world.py."""

    def waiting() -> Controller:
        job, run = make_job(steps=9), RunFolder(str(tmp_path))
        return Controller(job, LocalHost({}), run, str(tmp_path / "checkpoints"))

    first, second, said = waiting(), waiting(), []
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(first.run)
        until(lambda: len(starts(tmp_path)) == 1)
        await_handover(str(tmp_path), said.append)
        assert running.result(30)["reason"].startswith("another start of the job takes over")
        follows = pool.submit(second.run)
        until(lambda: len(starts(tmp_path)) == 2)
        second.stop("enough")
        assert follows.result(30)["reason"].startswith("enough")
    asked, handed_over = said
    assert asked.endswith(": it is asked to hand over")
    assert "has handed over, after" in handed_over
    names = [line["event"] for line in read_lines(tmp_path / "events.jsonl")]
    assert "controller_restarted" not in names
    await_handover(str(tmp_path), said.append)
    assert len(said) == 2, "nobody lives: nobody is asked"


def test_who_is_asked_to_stop_waits_for_no_other_to_hand_over(tmp_path: Path) -> None:
    """It waited for up to 150 s, took the job over then, and the job of the other one ended."""
    owners.take_over(open_store(str(tmp_path)), job="tiny", run="old", run_folder=str(tmp_path))
    signs = Alive(tmp_path)  # of one that lives, and is too busy to hear what it is asked
    signs.start()
    one = controller(tmp_path, steps=9)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.run)
        try:
            until(lambda: (tmp_path / handover.NAME).exists())
            one.stop("enough")
            with pytest.raises(JobFailed, match=r"enough.*run old .* goes on"):
                running.result(30)
        finally:
            signs.stop()
    owner, _ = owners.newest(open_store(str(tmp_path)))
    assert owner is not None and owner.run == "old"
    assert not (tmp_path / handover.NAME).exists()


def test_one_that_lives_is_asked_whatever_its_machines_clock_says(tmp_path: Path) -> None:
    """Of one 40 s behind it was said that nobody lives: it lost the steps of the last minutes."""
    owners.take_over(open_store(str(tmp_path)), job="tiny", run="old", run_folder=str(tmp_path))
    over, said = threading.Event(), list[str]()

    def live() -> None:
        while not over.wait(alive.EVERY_S / 4):
            sign = {"at_s": time.time() - 40.0, "host": "elsewhere", "pid": 1, "in_charge": True}
            (tmp_path / "swap").write_text(json.dumps(sign))
            (tmp_path / "swap").replace(tmp_path / alive.NAME)

    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(live)
        try:
            until(lambda: (tmp_path / alive.NAME).exists())
            await_handover(str(tmp_path), said.append, timeout_s=0.0)
        finally:
            over.set()
        living.result(30)
    assert said[0].endswith(": it is asked to hand over"), said


def test_one_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    owners.take_over(open_store(str(tmp_path)), job="tiny", run="old", run_folder=str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sign = {"at_s": time.time(), "host": os.uname().nodename, "pid": ended.pid}
    (tmp_path / "alive.json").write_text(json.dumps(sign))
    said: list[str] = []
    await_handover(str(tmp_path), said.append)
    assert said == []
    assert not (tmp_path / "handover.json").exists()


def test_one_whose_workers_live_has_a_successor_that_is_asked(tmp_path: Path) -> None:
    """Beside it another job was started, from the newest checkpoint."""
    store, here = open_store(str(tmp_path)), os.uname().nodename
    owners.take_over(store, job="tiny", run="old", run_folder=str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as worker, subprocess.Popen([sys.executable]) as gone:
        gone.kill()
        gone.wait()
        member = {"worker": "w0", "rank": 0, "pid": worker.pid, "node": "n0", "host": here}
        formed = {"event": "generation_formed", "step": 0, "generation": 1, "members": [member]}
        line = {"at_s": time.time() + 1, "seq": 0, "reason": "", **formed}
        (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
        sign = {"at_s": time.time(), "host": here, "pid": gone.pid, "in_charge": True}
        sign["followed"] = True
        (tmp_path / "alive.json").write_text(json.dumps(sign))
        said: list[str] = []
        follows = Alive(tmp_path)
        follows.in_charge = True

        def say(text: str) -> None:
            said.append(text)
            if len(said) == 1:
                owners.take_over(store, job="tiny", run="next", run_folder=str(tmp_path))
                follows.start()

        await_handover(str(tmp_path), say, timeout_s=0.0, next_s=30.0)
        follows.stop()
        worker.kill()
    assert said[0].startswith("no controller of this job is alive, 1 of its workers are: the next")
    assert said[1].startswith("run next of this job is alive on ")


def test_a_terminal_whose_job_was_taken_over_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "failed: ", and nothing else: the next start had removed its result. Where that was
    still there, it was "stopped", and 130, as if somebody had interrupted it: a supervisor would
    have started it again, and taken the job over from the one that had taken it over."""
    owners.take_over(open_store(str(tmp_path)), job="tiny", run="next", run_folder=str(tmp_path))
    handed_over = {"status": "stopped", "reason": f"{handover.REASON}; last good checkpoint: ..."}
    for result in ({}, handed_over):
        assert conclude(EndOfRun(result), str(tmp_path)) == COMPLETED
        assert "the job was handed over to another start" in "".join(capsys.readouterr())


def starts(folder: Path) -> list[Any]:
    lines = read_lines(folder / "events.jsonl")
    return [line for line in lines if line["event"] == "job_started"]
