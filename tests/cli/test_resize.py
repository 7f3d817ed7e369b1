"""``elastic-ft resize``: what it refuses, in one line, and what it writes.

A job that is really resized: tests/multiproc/test_elastic_policy.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, run_command
from elastic_ft.observe import alive
from elastic_ft.observe.resize_request import NAME
from elastic_ft.observe.run_folder import RunFolder

STARTED = {"at_s": 1.0, "event": "job_started", "generation": 0, "reason": "starting from the seed"}


def line(event: str, **fields: Any) -> str:
    return (
        json.dumps({"at_s": 1.0, "event": event, "generation": 1, "reason": "because", **fields})
        + "\n"
    )


@pytest.fixture
def run(write_job: Callable[..., str], folder: Path) -> Path:
    """The folder of a job of one to eight workers, that has started."""
    job = write_job(
        {
            "batch.global_batch_size": 8,
            "elastic": {"min_workers": 2, "max_workers": 8, "multiple_of": 2},
        }
    )
    path = folder / "run"
    path.mkdir()
    (path / "job.yaml").write_text(Path(job).read_text())
    (path / "events.jsonl").write_text(json.dumps(STARTED) + "\n")
    return path


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("1", "expected min_workers 2 to max_workers 8, found 1"),
        ("9", "expected min_workers 2 to max_workers 8, found 9"),
        ("5", "expected a multiple of 2 (elastic.multiple_of), found 5"),
        ("some", "Invalid value for '--workers'"),
    ],
)
def test_a_number_that_can_not_be_is_one_line(
    run: Path, capfd: pytest.CaptureFixture[str], workers: str, expected: str
) -> None:
    assert run_command(["resize", str(run), "--workers", workers]) == BAD_USAGE
    (said,) = capfd.readouterr().err.splitlines()
    assert expected in said
    assert not (run / NAME).exists()


def test_what_is_no_run_or_has_ended_is_one_line(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["resize", "nowhere", "--workers", "2"]) == BAD_USAGE
    assert "not a run folder" in capfd.readouterr().err
    with (run / "events.jsonl").open("a") as journal:
        journal.write(line("finished", status="completed"))
    assert run_command(["resize", str(run), "--workers", "2"]) == BAD_USAGE
    assert "the job has ended: because" in capfd.readouterr().err
    assert not (run / NAME).exists()


def test_nobody_answers_in_time(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["resize", str(run), "--workers", "4", "--timeout", "0.5"]) == FAILED
    assert "0 workers after 0.5 s, not 4; the request stands" in capfd.readouterr().err
    assert json.loads((run / NAME).read_text())["workers"] == 4


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def sign(run: Path, **fields: Any) -> None:
    """The last sign of life of the run's controller."""
    found = {"at_s": time.time() - 43, "host": os.uname().nodename, "pid": ended_process()}
    (run / alive.NAME).write_text(json.dumps(found | fields))


def test_a_dead_controller_is_told_at_once(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-task 4: it waited 300 s and said that the request stands."""
    monkeypatch.setattr(alive, "GONE_S", 0.0)
    sign(run)
    assert run_command(["resize", str(run), "--workers", "4"]) == FAILED
    said = capfd.readouterr().err
    assert re.search(r"no controller is alive: its last sign of life was 4\d s ago", said)
    assert run_command(["events", str(run)]) == COMPLETED
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("no controller is alive: its last sign of life was 4")


def test_a_sign_that_does_not_change_is_death_elsewhere_too(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "STILL_S", 0.2)
    monkeypatch.setattr(alive, "EVERY_S", 0.05)
    sign(run, host="another", at_s=time.time() + 3600)  # and its clock is wrong
    assert run_command(["resize", str(run), "--workers", "4"]) == FAILED
    assert "no controller is alive" in capfd.readouterr().err


def test_a_controller_that_lives_is_waited_for(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "EVERY_S", 0.05)
    monkeypatch.setattr(alive, "STILL_S", 3.0)
    living = alive.Alive(run)
    living.start()
    assert run_command(["resize", str(run), "--workers", "4", "--timeout", "4"]) == FAILED
    assert "0 workers after 4 s, not 4; the request stands" in capfd.readouterr().err
    assert run_command(["events", str(run)]) == COMPLETED
    assert "no controller" not in capfd.readouterr().out
    living.stop()


@pytest.mark.parametrize(("world", "idle"), [(4, 0), (2, 2)])
def test_it_waits_for_the_world_it_asked_for(run: Path, world: int, idle: int) -> None:
    """Those that the layout has no rank for count: they are there."""
    codes: list[int] = []
    asking = threading.Thread(
        target=lambda: codes.append(_main_in_thread(["resize", str(run), "--workers", "4"]))
    )
    asking.start()
    folder, asked = RunFolder(str(run)), None
    while asked is None:
        assert asking.is_alive() or codes == []
        asked = folder.new_request()
    assert folder.new_request() is None  # once
    unfit = [{"worker": f"w{i}", "reason": "worlds are multiples of 2"} for i in range(idle)]
    with (run / "events.jsonl").open("a") as journal:
        journal.write(line("resize_requested", workers=4, request=asked.request))
        journal.write(line("generation_formed", world_size=world, wanted=4, idle=unfit, members=[]))
    asking.join(60)
    assert codes == [COMPLETED]
    folder.drop_request()
    assert not (run / NAME).exists()


def _main_in_thread(arguments: list[str]) -> int:
    """Signal handlers are the main thread's to set."""
    from elastic_ft.cli.resize import resize

    return resize(arguments[1], int(arguments[3]), 60.0)


def test_a_job_that_refuses_says_why(run: Path) -> None:
    from elastic_ft.cli.resize import ResizeJournal
    from elastic_ft.errors import ConfigError
    from elastic_ft.observe.resize_request import ask_to_resize

    asked = ask_to_resize(str(run), 2)
    journal = ResizeJournal(str(run))
    journal.look()
    assert not journal.is_done(asked)
    with (run / "events.jsonl").open("a") as file:
        refused = line("resize_refused", workers=2, request=asked.request)
        file.write(refused)
    journal.look()
    with pytest.raises(ConfigError, match="refused: because"):
        journal.is_done(asked)


def test_a_request_in_a_remote_folder_reaches_the_run(run: Path) -> None:
    """Object stores have no notice of a change: the mirror looks."""
    from elastic_ft.observe.resize_request import ask_to_resize

    url = "memory://resized/run"
    folder = RunFolder(url)
    folder.take_over("run1", "tiny")
    try:
        folder.write_job(yaml.safe_load((run / "job.yaml").read_text()))
        assert folder.new_request() is None
        asked = ask_to_resize(url, 6)
        folder._attend()
        assert folder.new_request() == asked
        assert folder.new_request() is None
        folder.drop_request()
        folder._attend()
        assert folder.new_request() is None
    finally:
        folder.close()
