"""What needs torch is found out in a process that is forked from the warm one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ft.cli.check_model import check_model_and_data
from elastic_ft.config import Job, parse_job
from elastic_ft.errors import ModelError
from elastic_ft.hosts.local import forked_call, warm
from elastic_ft.hosts.local.forked_call import call_forked
from elastic_ft.hosts.local.warm import start_warm
from elastic_ft.hosts.ray.cluster import wait_for

WAIT_S = 30.0
CHECK = "elastic_ft.cli.check_model:check_model_and_data"


@pytest.fixture
def job() -> Job:
    return job_of({"preset": "decoder-1m"})


def job_of(model: dict[str, Any]) -> Job:
    data = {"path": "chaos.jobs:paced", "kwargs": {}}
    return parse_job({"name": "asked", "steps": 3, "model": model, "data": data})


def test_the_answer_is_what_it_would_be_here(job: Job) -> None:
    start_warm()
    assert call_forked(CHECK, job) == check_model_and_data(job)


def test_what_is_refused_there_is_refused_here() -> None:
    start_warm()
    with pytest.raises(ModelError, match=r"model\.path: .*no_such"):
        call_forked(CHECK, job_of({"path": "chaos.jobs:no_such"}))


def test_no_answer_is_none_and_the_folder_is_ours(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was there before knows nothing of a module of today's working directory."""
    (tmp_path / "asked_here.py").write_text(
        "import os\n"
        "def where(job): return os.getcwd(), os.environ['ASKED'], os.getpid()\n"
        "def ends(job): os._exit(3)\n"
        "def breaks(job): raise KeyError(job.name)\n"
        "def shares(job):\n"
        "    import multiprocessing\n"
        "    global manager\n"
        "    manager = multiprocessing.Manager()\n"
        "    return manager._process.pid\n"
    )
    start_warm()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ASKED", "today")
    folder, asked, pid = call_forked("asked_here:where", job)
    assert (folder, asked) == (str(tmp_path), "today") and pid != os.getpid()
    assert call_forked("asked_here:ends", job) is None
    assert call_forked("asked_here:breaks", job) is None
    manager = call_forked("asked_here:shares", job)  # which has the pipe, too, while it lives
    wait_for(lambda: ended(manager), WAIT_S, "the end of the model's own process")


STANDS = """
import os, pathlib, signal
def stands(job):
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_who_is_stopped_as_it_answers_is_not_waited_for(
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`elastic-ft run` stood there for ever, and said nothing."""
    monkeypatch.setattr(forked_call, "LOOK_S", 0.05)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stands_still.py").write_text(STANDS)
    start_warm()
    assert asked_in_time("stands_still:stands", job) == [None]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: ended(pid), WAIT_S, "its end")
    assert "stands still" in capfd.readouterr().err
    assert call_forked(CHECK, job) == check_model_and_data(job), "the warm process goes on"


def test_a_warm_process_that_is_stopped_is_not_waited_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_call, "LOOK_S", 0.05)
    start_warm()
    assert warm._warm is not None
    process = psutil.Process(warm._warm.pid)
    process.suspend()
    assert asked_in_time(CHECK, job) == [None]
    assert not process.is_running() and start_warm(), "another one is started in its place"
    assert call_forked(CHECK, job) == check_model_and_data(job)


def asked_in_time(function: str, job: Job) -> list[Any]:
    found = list[Any]()
    asking = threading.Thread(target=lambda: found.append(call_forked(function, job)), daemon=True)
    asking.start()
    asking.join(2 * WAIT_S)
    return found


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
