"""Whoever was away kills nobody before the store says that the job is still its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.controller.kills import Kills
from elastic_ft.errors import Superseded
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from tests.oneproc.test_publisher import DEADLINE_S, JOB


class Sparing(LocalHost):
    def __init__(self) -> None:
        super().__init__({})
        self.killed: list[str] = []

    def kill_worker(self, worker: str) -> None:
        self.killed.append(worker)

    def kill_keeper(self, node: str) -> None:
        self.killed.append(node)


@pytest.mark.parametrize("is_remote", [True, False])
def test_who_was_away_kills_once_that_is_confirmed(is_remote: bool) -> None:
    host, asked = Sparing(), list[Callable[[], None]]()
    kills = Kills(host, asked.append, 10.0, is_remote=is_remote)
    kills.awake()
    kills.worker("w0")
    assert host.killed == ["w0"] and not asked
    kills._awake_at_s -= 11.0
    kills.awake()
    kills.worker("w1")
    kills.keeper("n1")
    kills.awake()
    if not is_remote:  # its run folder says it at once
        assert host.killed == ["w0", "w1", "n1"] and not asked
        return
    assert host.killed == ["w0"]
    (confirmed,) = asked
    confirmed()
    kills.awake()
    assert host.killed == ["w0", "w1", "n1"]


def test_a_superseded_controller_that_wakes_up_kills_nobody(tmp_path: Path) -> None:
    """Its mirror has not seen yet that another has the folder; the checkpoint store knows it."""
    host, url = Sparing(), f"{tmp_path}/checkpoints"
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    controller = Controller(JOB, host, folder, url)
    posted: list[Any] = []
    heard = threading.Event()

    def post(told: Any) -> None:
        posted.append(told)
        heard.set()

    controller._publisher._post = post
    controller._publisher.take_over(folder.url, ())
    owners.take_over(open_store(url), job=JOB.name, run="other", run_folder="x", address="h:1")
    controller._kills._awake_at_s -= JOB.elastic.heartbeat_timeout_s + 1
    controller._listen(0.0)
    controller._inquiries.kill("w0")
    assert heard.wait(DEADLINE_S)
    controller._listen(0.0)
    assert not host.killed and isinstance(posted[0], Superseded)
    controller._publisher.close()
    folder.close()
