"""A job whose run folder and checkpoints are in a mount that hangs: really, a frozen disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller import publisher
from elastic_ft.controller.controller import Controller
from elastic_ft.core import deadlines
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import run_folder
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import mounts
from tests.hanging import Disk, disk, needs_root
from tests.multiproc.harness import PATIENT, Once, Run, make_job, run_job

pytestmark = [needs_root, pytest.mark.timeout(280)]
FREEZES_AT, THAWS_AFTER = 6, 12  # steps; in the smaller world

STOPPED_MAX_S = 140.0  # a start, and some deadlines
SHORT_S = 5.0  # in place of a minute or two


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Not yet."""
    with disk(tmp_path) as mount:
        monkeypatch.setenv(mounts.NAMED, str(mount.point))
        yield mount


class Outage:
    """The disk freezes and a worker is killed; it thaws once the others have trained on."""

    def __init__(self, mount: Disk, victim: int) -> None:
        self._mount, self._victim = mount, victim
        self._begin = Once(FREEZES_AT, self._freeze)
        self.was_frozen: bool | None = None  # until the others had trained on

    def _freeze(self, controller: Controller, host: LocalHost) -> None:
        self._mount.freeze()
        assert controller.state.assignment is not None
        member = controller.state.assignment.members[self._victim]
        os.kill(host._processes[member.worker].pid, signal.SIGKILL)

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        self._begin(controller, line)
        smaller = self._begin.done and line["generation"] > 1
        if smaller and line["step"] >= FREEZES_AT + THAWS_AFTER and self.was_frozen is None:
            self.was_frozen = self._mount.thaw()


def test_who_is_lost_while_the_mount_hangs_is_trained_around(frozen: Disk, tmp_path: Path) -> None:
    """The controller stood still in its journal, for as long as the disk did."""
    checkpoint = {"every_steps": 4}
    job = make_job("fsdp", steps=40, workers=3, checkpoint=checkpoint, elastic=dict(PATIENT))
    outage, url = Outage(frozen, 2), str(frozen.point / "run")
    run = run_job(job, tmp_path / "run", on_step=outage, folder_url=url).check()
    assert outage.was_frozen, run.story()
    _is_trained_around(run)
    assert RunReader(url).result()["status"] == "completed"
    assert run.result["checkpoints"][0]["step"] == 40


def test_a_stop_is_obeyed_while_the_mount_hangs(
    frozen: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: a last checkpoint has nowhere to go. What is there by then is gone on from."""
    for module, name in (
        (run_folder, "STORE_S"),
        (deadlines, "SAVE_BASE_S"),
        (publisher, "CLOSE_S"),  # a manifest may be on its way
    ):
        monkeypatch.setattr(module, name, SHORT_S)
    checkpoint = {"every_steps": 4}
    job = make_job("fsdp", steps=100_000, workers=2, checkpoint=checkpoint, elastic=dict(PATIENT))

    def stop(controller: Controller, host: LocalHost) -> None:
        frozen.freeze()
        for _ in range(2):
            controller.stop("asked")

    once = Once(FREEZES_AT, stop, checkpointed=True)
    run = run_job(job, frozen.point / "run", on_step=once)
    assert frozen.thaw(), "it was frozen till then"
    assert run.result["status"] == "stopped" and run.wall_s < STOPPED_MAX_S, run.result["reason"]


def _is_trained_around(run: Run) -> None:
    recovery = run.recoveries[0]
    assert recovery["cause"] == "worker_lost" and recovery["steps_lost"] == 0, run.story()
    assert recovery["survivors_kept_pid"], run.story()
    assert recovery["at_step"] < FREEZES_AT + THAWS_AFTER, run.story()
