"""What needs torch is found out in a process that is forked from the warm one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ft.cli.check_model import check_model_and_data
from elastic_ft.config import Job, parse_job
from elastic_ft.errors import ModelError
from elastic_ft.hosts.local.forked_call import call_forked
from elastic_ft.hosts.local.warm import start_warm
from elastic_ft.hosts.ray.cluster import wait_for

WAIT_S = 30.0
CHECK = "elastic_ft.cli.check_model:check_model_and_data"


@pytest.fixture
def job() -> Job:
    return job_of({"preset": "decoder-1m"})


def job_of(model: dict[str, Any]) -> Job:
    data = {"path": "chaos.jobs:Paced", "kwargs": {}}
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


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
