"""Commands at a run folder in a mount that hangs: a line, in time, and they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED
from elastic_ft.config import Job
from elastic_ft.observe import alive
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import mounts
from elastic_ft.storage.store import open_store
from tests.cli.conftest import DEADLINE_S, ENDLESS, Command
from tests.cli.test_detached import Start, WriteJob, lose
from tests.hanging import Disk, disk, needs_root, silent
from tests.storage.test_attach_in_s3 import JOB
from tests.waiting import until

pytestmark = [needs_root, pytest.mark.timeout(280)]
SHORT_S = 2.0  # in place of the 10 s that a command lets a store be silent
COMMAND = f"""
from elastic_ft.observe import alive, run_reader
alive.READ_DEADLINE_S = run_reader.READ_DEADLINE_S = {SHORT_S}
from elastic_ft.cli.app import main
main()
"""


class Hurried(Command):
    """``elastic-ft`` that gives a read up sooner."""

    program = ("-c", COMMAND)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with disk(tmp_path) as made:
        monkeypatch.setenv(mounts.NAMED, str(made.point))
        yield made


@pytest.fixture
def running(mount: Disk) -> Iterator[RunFolder]:
    """The folder of a job that is under way, with its controller's signs of life."""
    folder = RunFolder(str(mount.point / "run"))
    folder.take_over("run1", "watched")
    folder.write_job(Job.model_validate(JOB).model_dump(mode="json"))
    folder.journal(1.0, "run_started", 0, "", {})
    signs = alive.Alive(folder.path)
    signs.start()
    until(lambda: open_store(folder.url).exists("job.yaml"))
    until(lambda: alive.last_sign(folder.url) is not None)
    yield folder
    signs.stop()
    mount.thaw()
    folder.close()


def test_stop_ends_while_the_disk_is_frozen(mount: Disk, running: RunFolder) -> None:
    """It asked for ever, and could not be killed."""
    mount.freeze()
    stop = Hurried(mount.point.parent, "stop", running.url, "--timeout", "3")
    code, out, err = stop.finish()
    assert mount.thaw(), "it was frozen till then"
    assert code == FAILED
    assert "is tried again: cannot write" in out
    (line,) = err.splitlines()
    assert "not stopped after 3 s; it could not be asked: cannot write" in line


def test_what_was_recorded_meanwhile_is_there_when_the_disk_is(
    mount: Disk, running: RunFolder
) -> None:
    mount.freeze()
    for step in range(1, 101):
        running.record_step({"step": step, "generation": 1}, [step])
    running.flush()
    running.write_result({"status": "completed", "reason": "", "steps": 100})
    assert mount.thaw(), "nothing of that has waited for it"
    running.close()
    assert (mount.point / "run" / "steps.jsonl").read_text().count("\n") == 100
    assert "completed" in (mount.point / "run" / "result.json").read_text()


@pytest.mark.parametrize("command", ["attach", "events", "stop"])
def test_where_nothing_can_be_read_a_line_says_so(tmp_path: Path, command: str) -> None:
    """Nothing came, for ever."""
    with silent(tmp_path) as point:
        more = ("--timeout", "3") if command == "stop" else ()
        code, _, err = Hurried(tmp_path, command, str(point / "run"), *more).finish()
    (line,) = err.splitlines()
    assert code in (FAILED, BAD_USAGE)
    assert "the file system has not answered for" in line


def test_those_in_charge_may_go_while_the_disk_is_frozen(
    mount: Disk, start: Start, write_job: WriteJob
) -> None:
    """The next controller waits for the disk, workers and their launcher for that."""
    out = str(mount.point / "run")
    patient = ENDLESS | {"elastic.controller_timeout_s": 240}
    first, run = start("run", write_job(patient), "--processes", "--out", out), RunReader(out)
    until(lambda: len(run.steps()) > 3)
    before = members_of(run)
    mount.freeze()
    lose("ef-controller", first)
    assert {process.pid for process in first.left()} >= before
    assert mount.thaw(), "it was frozen till then"
    until(lambda: any(line["event"] == "adopted" for line in run.events()))
    reached = len(run.steps())
    until(lambda: len(run.steps()) > reached)
    code, said, err = start("stop", out).finish()
    assert (code, err) == (COMPLETED, ""), said
    psutil.wait_procs(first.left(), DEADLINE_S)
    assert first.left() == []
    assert members_of(run) == before
    steps = [line["step"] for line in run.steps()]
    assert steps == [*range(1, len(steps) + 1)]
    assert [line["seq"] for line in run.events()] == [*range(len(run.events()))]


def members_of(run: RunReader) -> set[int]:
    formed = [line for line in run.events() if line["event"] == "generation_formed"]
    return {member["pid"] for member in formed[-1]["members"]}
