"""Ray's controller is killed, and its run folder is in S3: ``attach`` and ``stop`` wait for the
next one, which makes no sign before it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from uuid import uuid4

import pytest

from chaos.s3_server import S3Server
from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.config import Job
from elastic_ft.observe import alive, run_folder, stop_request
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage.store import open_store
from tests.storage.test_attach_in_s3 import JOB, RESULT
from tests.waiting import until

RAYS_S = 60.0  # hosts.ray.ray_host: successor_within_s
STILL_S = 0.5  # in place of 3 s of a process that is gone, and of 30 s
LOOKS = 3  # after which it would have been taken for dead
CONTROLLER = """
import json, sys, threading
from elastic_ft.observe import alive
from elastic_ft.observe.run_folder import RunFolder

folder = RunFolder(sys.argv[1])
folder.take_over("run1", "watched")
folder.write_job(json.loads(sys.argv[3]))
signs = alive.Alive(folder.path, True, float(sys.argv[2]))
signs.in_charge = True
signs.start()
threading.Event().wait()
"""


class Overdue:
    """Counts the looks at a sign that is older than one may be that nobody follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._look = 0, alive.Vigil.look
        monkeypatch.setattr(alive, "GONE_S", STILL_S)
        monkeypatch.setattr(alive, "STILL_REMOTE_S", STILL_S)
        monkeypatch.setattr(alive, "EVERY_S", STILL_S / 5)
        monkeypatch.setattr(alive.Vigil, "look", lambda vigil: self._counted(vigil))

    def _counted(self, vigil: alive.Vigil) -> str:
        said = self._look(vigil)
        still_s = alive.time.monotonic() - vigil._since_s
        self.count += vigil._sign is not None and vigil._sign.gone and still_s > STILL_S
        return said


@pytest.fixture
def overdue(monkeypatch: pytest.MonkeyPatch) -> Overdue:
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 0.1)
    return Overdue(monkeypatch)


@pytest.fixture
def url(s3: S3Server) -> str:
    """Of a job whose controller left signs as Ray's does, and was killed."""
    url = s3.url(uuid4().hex)
    job = json.dumps(Job.model_validate(JOB).model_dump(mode="json"))
    with subprocess.Popen([sys.executable, "-c", CONTROLLER, url, str(RAYS_S), job]) as first:
        until(lambda: alive.last_sign(url) and open_store(url).exists("job.yaml"))
        first.kill()
    return url


@pytest.mark.parametrize("command", ["attach", "stop"])
def test_the_next_controller_is_waited_for(
    url: str, overdue: Overdue, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def follow() -> None:
        until(lambda: overdue.count >= LOOKS)
        folder = RunFolder(url)
        folder.take_over("run2", "watched")
        signs = alive.Alive(folder.path, True, RAYS_S)
        signs.start()
        if command == "stop":
            until(lambda: folder.asked(stop_request.NAME) is not None)
        folder.write_result(RESULT)
        signs.stop()
        folder.close()

    next_one = threading.Thread(target=follow)
    next_one.start()
    code = run_command([command, url])
    next_one.join()
    said = capfd.readouterr()
    assert (code, said.err) == (COMPLETED, ""), said
    assert overdue.count >= LOOKS
    if command == "stop":
        assert "run run1, on" in said.out and "run run2, on" in said.out
