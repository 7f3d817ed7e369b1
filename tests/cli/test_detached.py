"""Jobs that outlive their terminal: run, attach, stop."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, INTERRUPTED, run_command
from elastic_ft.cli.run import Fitting
from elastic_ft.cli.terminal import Ending, stay
from elastic_ft.observe.run_reader import RunReader
from tests.cli.conftest import ENDLESS
from tests.waiting import until

Start = Callable[..., Any]
WriteJob = Callable[..., str]
DEADLINE_S = 150.0


def pids_of(run: Path) -> set[int]:
    formed = [e for e in RunReader(run).events() if e["event"] == "generation_formed"]
    return {member["pid"] for member in formed[-1]["members"]}


def events_of(run: Path) -> set[str]:
    return {line["event"] for line in RunReader(run).events()}


def lose(title: str, command: Any) -> None:
    """Another one takes its place."""
    former = command.named(title)
    former.kill()
    until(lambda: command.has(title, besides=former.pid))


def lose_both(command: Any) -> None:
    """Launcher and controller at the same time: then a keeper starts another launcher."""
    former = {title: command.named(title) for title in ("ef-launcher", "ef-controller")}
    for process in former.values():
        process.suspend()
    for process in former.values():
        process.kill()
    for title, process in former.items():
        until(lambda: command.has(title, besides=process.pid))  # noqa: B023


def test_a_terminal_may_go_and_another_one_may_come(
    start: Start, write_job: WriteJob, folder: Path
) -> None:
    """By SIGHUP, as one that is closed, and by SIGKILL; then from outside: attach, stop.

    Meanwhile those in charge die, too.
    """
    patient = ENDLESS | {"elastic.controller_timeout_s": 240}  # a launcher imports torch
    run, first = folder / "runs/tiny", start("run", write_job(patient), "--processes")
    first.until_step(3)
    os.killpg(first.process.pid, signal.SIGHUP)
    first.process.wait(DEADLINE_S)
    before = pids_of(run)
    lose("ef-controller", first)
    until(lambda: "adopted" in events_of(run))
    lose("ef-launcher", first)
    lose_both(first)
    second = start("attach", "runs/tiny")
    reached = RunReader(run).steps()[-1]["step"]
    second.until_step(reached + 20)
    os.killpg(second.process.pid, signal.SIGKILL)
    left = {process.pid for process in first.left()}
    assert left >= before, [line["reason"] for line in RunReader(run).events()]
    third = start("attach", "runs/tiny")
    so_far = third.process.stdout.readline()
    fourth = start("stop", "runs/tiny")
    code, out, err = fourth.finish()
    assert (code, err) == (COMPLETED, "")
    assert "is asked to stop" in out.splitlines()[0]
    assert out.splitlines()[1].startswith("stopped: elastic-ft stop; last good checkpoint: step")
    code, out, err = third.finish()
    assert (code, err) == (INTERRUPTED, "")
    assert so_far.startswith("   before  ")
    assert out.splitlines()[-1].startswith("stopped: elastic-ft stop")
    psutil.wait_procs(first.left(), DEADLINE_S)
    assert first.left() == []
    assert pids_of(run) == before
    assert "controller_restarted" not in events_of(run)
    steps = [line["step"] for line in RunReader(run).steps()]
    assert steps == [*range(1, len(steps) + 1)]


def test_a_terminal_may_stand_still(start: Start, write_job: WriteJob, folder: Path) -> None:
    """Ctrl-Z, and it takes nothing of what it is told. It tells the end once it goes on."""
    run, first = folder / "runs/tiny", start("run", write_job(ENDLESS), "--processes")
    first.until_step(3)
    before = pids_of(run)
    first.process.send_signal(signal.SIGSTOP)
    reached = RunReader(run).steps()[-1]["step"]
    until(lambda: RunReader(run).steps()[-1]["step"] > reached + 20)
    lose("ef-controller", first)
    until(lambda: "adopted" in events_of(run))
    code, _, err = start("stop", "runs/tiny").finish()
    assert (code, err) == (COMPLETED, "")
    assert pids_of(run) == before
    first.process.send_signal(signal.SIGCONT)
    code, out, err = first.finish()
    assert (code, err) == (INTERRUPTED, "")
    assert out.splitlines()[-1].startswith("stopped: elastic-ft stop")


@pytest.mark.soak
def test_launcher_and_controller_may_stand_still_together(
    start: Start, write_job: WriteJob, folder: Path
) -> None:
    """Neither sees that the other does. What wakes up later is nobody's any more."""
    patient = ENDLESS | {"elastic.controller_timeout_s": 240}
    run, first = folder / "runs/tiny", start("run", write_job(patient), "--processes")
    first.until_step(3)
    os.killpg(first.process.pid, signal.SIGKILL)
    before = pids_of(run)
    former = {title: first.named(title) for title in ("ef-launcher", "ef-controller")}
    for process in former.values():
        process.suspend()
    for title, process in former.items():
        until(lambda: first.has(title, besides=process.pid))  # noqa: B023
    until(lambda: "in_charge" in events_of(run))
    former["ef-controller"].resume()
    former["ef-controller"].wait(DEADLINE_S)
    assert not former["ef-launcher"].is_running(), "a keeper has ended it"
    assert start("stop", "runs/tiny").finish()[0] == COMPLETED
    psutil.wait_procs(first.left(), DEADLINE_S)
    assert first.left() == []
    assert pids_of(run) == before
    assert not {"controller_restarted", "worker_lost"} & events_of(run)
    steps = [line["step"] for line in RunReader(run).steps()]
    assert steps == [*range(1, len(steps) + 1)]


class Goes:
    """A job that ends once it was asked to."""

    def __init__(self, came: list[int], *interrupts: int) -> None:
        self._came, self._interrupts, self.stopped = came, list(interrupts), 0

    def poll(self, timeout_s: float) -> Ending | None:
        if self._interrupts:
            self._came.extend([signal.SIGINT] * self._interrupts.pop(0))
            return None
        return Ending(0)

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield
    os.close(ours)


def test_at_a_terminal_a_second_interrupt_leaves(
    terminal: None, capfd: pytest.CaptureFixture[str]
) -> None:
    came: list[int] = []
    job = Goes(came, 0, 1, 0, 1, 0)
    assert stay(job, "runs/x", came, stops=True) is None
    asked, left = capfd.readouterr().out.splitlines()
    assert "Ctrl-C again to leave it running, elastic-ft stop runs/x stops it" in asked
    assert left == "left running; elastic-ft attach runs/x shows it again"
    assert job.stopped == 0


def test_at_a_terminal_one_interrupt_is_a_question(
    terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ft.cli.terminal.SECOND_S", 0.0)
    came: list[int] = []
    assert stay(Goes(came, 1, 1, 1), "runs/x", came, stops=True) == Ending(0)


def test_at_a_terminal_sigterm_is_no_question(
    terminal: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """``docker run -t`` gave the answer itself, by SIGKILL, ten seconds later."""
    came = [int(signal.SIGTERM)]
    job = Goes(came, 0)
    assert stay(job, "runs/x", came, stops=True) == Ending(0)
    assert (job.stopped, capfd.readouterr().out) == (1, "")
    assert stay(Goes(came, 0), "runs/x", came, stops=False) is None


def test_elsewhere_interrupts_stop_a_job_that_was_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    came: list[int] = []
    job = Goes(came, 1, 1)
    assert stay(job, "runs/x", came, stops=True) == Ending(0)
    assert job.stopped == 2
    came.clear()
    assert stay(Goes(came, 1), "runs/x", came, stops=False) is None


def test_who_is_asked_to_stop_says_which_checkpoint_there_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``ray job stop`` leaves it 3 s: the log named none."""
    asked: list[str] = []
    over = threading.Event()
    trainer: Any = SimpleNamespace(fit=over.wait, stop=asked.append)
    fitting = Fitting(trainer, str(tmp_path))
    fitting.stop()
    assert f"till then there is none under {tmp_path}" in capfd.readouterr().out
    (tmp_path / "manifests").mkdir()
    for step in (5, 10):
        (tmp_path / f"manifests/{step:010d}-0.json").write_text("{}")
    fitting.stop()  # said once
    assert capfd.readouterr().out == ""
    second = Fitting(trainer, str(tmp_path))
    second.stop()
    assert "till then the newest checkpoint is of step 10" in capfd.readouterr().out
    over.set()
    assert fitting.poll(30.0) == second.poll(30.0) == Ending(0)
    assert asked == ["interrupted"] * 3


def test_what_can_not_be_stopped_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic_ft.observe import alive
    from elastic_ft.storage import owners
    from elastic_ft.storage.store import open_store

    assert run_command(["stop", "nowhere"]) == BAD_USAGE
    assert "nowhere: not a run folder" in capfd.readouterr().err
    run = folder / "run"
    run.mkdir()
    claim = owners.take_over(open_store(str(run)), job="tiny", run="one", run_folder=str(run))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sign = {"at_s": time.time() - 43, "host": os.uname().nodename, "pid": ended.pid}
    (run / alive.NAME).write_text(json.dumps(sign))
    monkeypatch.setattr(alive, "GONE_S", 0.0)
    assert run_command(["stop", "run"]) == FAILED
    (said,) = capfd.readouterr().err.splitlines()
    assert "nothing is to be stopped: no controller is alive" in said
    claim.ended()
    (run / "result.json").write_text('{"status": "completed", "reason": ""}')
    assert run_command(["stop", "run"]) == BAD_USAGE
    (said,) = capfd.readouterr().err.splitlines()
    assert said.endswith("run: the job has ended: completed: all steps are done")
