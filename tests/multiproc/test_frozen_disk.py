"""A job whose run folder and checkpoints are in a mount that hangs: really, a frozen disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller import publisher
from elastic_ft.controller.controller import Controller
from elastic_ft.core import deadlines
from elastic_ft.core.assignment import Keeper
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import run_folder
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import mounts
from tests.hanging import Disk, disk, needs_root
from tests.multiproc.harness import PACED, PATIENT, Once, Run, host_of, make_job, run_job

pytestmark = [needs_root, pytest.mark.timeout(280)]
FREEZES_AT, THAWS_AFTER = 6, 12  # steps; in the smaller world

STOPPED_MAX_S = 140.0  # a start, and some deadlines
SHORT_S = 5.0  # in place of a minute or two
SILENT_S = 4.0  # who is stopped
Strike = Callable[[Controller], None]
Seen = Callable[[Controller], bool]


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Not yet."""
    with disk(tmp_path) as mount:
        monkeypatch.setenv(mounts.NAMED, str(mount.point))
        yield mount


class Outage:
    """The disk freezes and somebody is struck; it thaws once the others have trained on."""

    def __init__(self, mount: Disk, strike: Strike, is_outlived: Seen) -> None:
        self._mount, self._strike, self._is_outlived = mount, strike, is_outlived
        self._begin = Once(FREEZES_AT, self._freeze)
        self.was_frozen: bool | None = None  # until the others had trained on

    def _freeze(self, controller: Controller, host: LocalHost) -> None:
        self._mount.freeze()
        self._strike(controller)

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        self._begin(controller, line)
        late = self._begin.done and line["step"] >= FREEZES_AT + THAWS_AFTER
        if late and self.was_frozen is None and self._is_outlived(controller):
            self.was_frozen = self._mount.thaw()


def of_worker(signum: signal.Signals) -> Strike:
    """Strikes that of rank 2."""

    def strike(controller: Controller) -> None:
        assert controller.state.assignment is not None
        member = controller.state.assignment.members[2]
        os.kill(host_of(controller)._processes[member.worker].pid, signum)

    return strike


def is_smaller(controller: Controller) -> bool:
    return controller.state.generation > 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_who_is_lost_while_the_mount_hangs_is_trained_around(
    frozen: Disk, tmp_path: Path, signum: signal.Signals
) -> None:
    """The controller stood still in its journal, for as long as the disk did: it killed nobody who
    is silent, either."""
    elastic = dict(PATIENT) if signum == signal.SIGKILL else {"heartbeat_timeout_s": SILENT_S}
    checkpoint = {"every_steps": 4}
    job = make_job("fsdp", steps=40, workers=3, checkpoint=checkpoint, elastic=elastic)
    outage = Outage(frozen, of_worker(signum), is_smaller)
    url = str(frozen.point / "run")
    run = run_job(job, tmp_path / "run", on_step=outage, folder_url=url).check()
    assert outage.was_frozen, run.story()
    _is_trained_around(run, "worker_lost" if signum == signal.SIGKILL else "worker_hung")
    assert RunReader(url).result()["status"] == "completed"
    assert run.result["checkpoints"][0]["step"] == 40


def test_a_keeper_that_is_stopped_while_the_mount_hangs_is_replaced(
    frozen: Disk, tmp_path: Path
) -> None:
    """And no worker pays for it."""
    stopped, url = list[Keeper](), str(frozen.point / "run")

    def stop(controller: Controller) -> None:
        stopped.append(controller.state.keepers["n0"])
        os.kill(host_of(controller).keeper_of("n0"), signal.SIGSTOP)

    def is_replaced(controller: Controller) -> bool:
        return controller.state.keepers.get("n0") not in (None, stopped[0])

    outage = Outage(frozen, stop, is_replaced)

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        outage(controller, line)
        if outage.was_frozen is not None:
            controller.stop("the keeper was replaced")

    sections = {"elastic": {"heartbeat_timeout_s": SILENT_S}, "checkpoint": {"every_steps": 50}}
    job = make_job("fsdp", steps=100_000, workers=2, data=PACED, **sections)
    run = run_job(job, tmp_path / "run", on_step=on_step, folder_url=url).check("stopped")
    assert outage.was_frozen, run.story()
    (silent,) = run.all("keeper_lost")
    assert silent["node"] == "n0" and "nothing heard for" in silent["reason"], run.story()
    assert [line["node"] for line in run.after(silent, "keeper_ready")] == ["n0"], run.story()
    assert len(run.all("generation_formed")) == 1 and run.recoveries == [], run.story()


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


def _is_trained_around(run: Run, cause: str) -> None:
    recovery = run.recoveries[0]
    assert recovery["cause"] == cause and recovery["steps_lost"] == 0, run.story()
    assert recovery["survivors_kept_pid"], run.story()
    assert recovery["at_step"] < FREEZES_AT + THAWS_AFTER, run.story()
