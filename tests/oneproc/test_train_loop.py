"""A train loop of the user's that asks for no step: it is told so, in words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import elastic_ft
from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.errors import UsageError
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.worker import line as line_module
from elastic_ft.worker.step import Step
from elastic_ft.worker.this_process import member_here, run_worker, steps_that
from tests.multiproc.harness import make_job

DEADLINE_S = 60.0


class OneThread(LocalHost):
    """Its one worker is a thread of this process, and runs ``loop``."""

    def __init__(self, loop: Callable[[], Any]) -> None:
        super().__init__({})
        self._loop = loop
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            member = member_here("w0", "n0", "localhost")
            run_worker(self._address, self._key, member, train_loop=self._linked)
        except UsageError:
            return  # told to the controller

    def _linked(self) -> Any:
        """Otherwise it would call a controller that has ended, into other tests' output."""
        for thread in threading.enumerate():
            if thread.name == "store-link":
                thread.join(DEADLINE_S)
        return self._loop()

    def want_workers(self, total: int) -> None:
        if total and not self.thread.is_alive():
            self.thread.start()


def run_job_here(folder: Path, job: Job, seen: Callable[[Step], Any]) -> dict[str, Any]:
    """In this process, telling ``seen`` of each step. Returns its result."""

    def loop() -> None:
        for step in elastic_ft.train():
            seen(step)

    return run(folder, loop, job)


def run(folder: Path, loop: Callable[[], Any], job: Job | None = None) -> dict[str, Any]:
    job, host = job or make_job(steps=2, workers=1), OneThread(loop)
    controller = Controller(job, host, RunFolder(str(folder)), str(folder / "checkpoints"))
    result = controller.run()
    host.thread.join(DEADLINE_S)
    assert not host.thread.is_alive()
    return result


def test_a_train_loop_that_ends_without_a_step_is_told_so(tmp_path: Path) -> None:
    """D8: nothing was said until start_timeout_s had passed."""
    result = run(tmp_path, lambda: None)
    assert result["status"] == "failed"
    assert (
        "w0: UsageError: the train loop ended and never iterated over elastic_ft.train()"
        in result["reason"]
    )


def test_a_train_loop_that_goes_on_without_a_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "LOOP_SILENT_S", 0.01)
    told: list[dict[str, Any]] = []

    def loop() -> None:
        pause, waited_s = threading.Event(), 0.0
        while not told and waited_s < DEADLINE_S:
            pause.wait(0.02)
            waited_s += 0.02
            told.extend(
                line
                for line in read_lines(tmp_path / "events.jsonl")
                if line["event"] == "loop_without_steps"
            )
        for _ in elastic_ft.train():
            pass

    assert run(tmp_path, loop)["status"] == "completed"
    (line,) = told
    assert line["worker"] == "w0"
    assert "has not begun to iterate over elastic_ft.train()" in line["reason"]


def test_a_loop_sees_the_steps_that_it_asks_for(tmp_path: Path) -> None:
    """The job is trained all the same."""
    seen: list[int] = []

    def loop() -> None:
        seen.extend(step.number for step in steps_that(lambda step: step.number % 3 == 0))

    result = run(tmp_path, loop, make_job(steps=7, workers=1))
    assert (result["status"], result["steps"], seen) == ("completed", 7, [3, 6])
