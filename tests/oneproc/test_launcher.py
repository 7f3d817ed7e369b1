"""Who forks the processes of a run on this machine, and what they have of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ft.errors import JobFailed
from elastic_ft.hosts.local import LocalHost, to_launcher
from elastic_ft.hosts.local.detached import DetachedRun
from elastic_ft.hosts.local.launcher import Charge, Launcher
from elastic_ft.hosts.local.orders import (
    ENDED_KEPT,
    PACKET_BYTES,
    Forked,
    KeepNodes,
    KillProcess,
    Order,
    ProcessTable,
    listen_in,
    number_of,
)
from elastic_ft.hosts.local.warm import stop_warm
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from elastic_ft.transport.messages import encode
from elastic_ft.transport.reception import listen
from elastic_ft.transport.tls import JobKey
from tests.multiproc.harness import make_job
from tests.waiting import until

DEADLINE_S = 200.0  # one imports torch, on what other tiers leave
WOKEN_S = 30.0  # to answer, for one that has imported all and was stopped
KEY = JobKey(b"k" * 32)


@pytest.fixture
def nobody() -> Iterator[tuple[str, int]]:
    """An address that takes calls and never answers: who calls there waits for a welcome."""
    with listen("127.0.0.1") as silent:
        yield silent.getsockname()


class Waiting(LocalHost):
    """Its workers wait for a controller that does not answer."""

    def __init__(self, address: tuple[str, int], *args: Any) -> None:
        super().__init__({"n0": 2}, *args)
        self.told: list[Any] = []
        self.start(self.told.append, address, KEY)

    def worker(self, name: str) -> int:
        until(lambda: self.pid_of(name))
        return self.pid_of(name) or 0

    def launcher(self) -> psutil.Process:
        """Of a worker that is there."""
        parent = psutil.Process(self.worker("w0")).parent()
        assert parent is not None
        return parent


@pytest.fixture
def host(nobody: tuple[str, int]) -> Iterator[Waiting]:
    made = Waiting(nobody)
    yield made
    made.close()


def test_who_is_killed_is_told_of_with_the_signal_and_replaced(host: Waiting) -> None:
    host.want_workers(1)
    pid = host.worker("w0")
    host.kill_worker("w0")
    until(lambda: host.told)
    (lost,) = host.told
    assert (lost.worker, lost.cause) == ("w0", "killed by SIGKILL")
    assert host.worker("w1") != pid


def test_a_launcher_that_dies_leaves_its_workers_to_the_next(host: Waiting) -> None:
    host.want_workers(1)
    pid, first, line = host.worker("w0"), host.launcher(), host._line._line
    first.kill()
    until(lambda: host._line._line not in (line, None))
    assert psutil.pid_exists(pid)
    assert host.told == []
    host.want_workers(2)
    assert psutil.Process(host.worker("w1")).ppid() != first.pid
    host.kill_worker("w0")
    until(lambda: host.told)
    assert (host.told[0].worker, host.told[0].cause) == ("w0", "its process has ended")


def test_a_launcher_that_says_nothing_is_killed_and_followed_by_another(
    host: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for, for ever: no worker was started any more, and nobody's end was known."""
    host.want_workers(1)
    pid, first = host.worker("w0"), host.launcher()
    with monkeypatch.context() as impatient:  # with this one alone
        impatient.setattr(to_launcher, "ANSWER_S", 1.0)
        first.suspend()
        host.want_workers(2)
        until(lambda: not psutil.pid_exists(first.pid))
    until(lambda: sum(host.pid_of(name) is not None for name in host.alive()) == 2)
    assert psutil.pid_exists(pid)
    assert [lost.worker for lost in host.told] == ["w1"], "nobody knows whether it was forked"


def test_who_is_asked_for_between_two_launchers_is_started_by_the_next(host: Waiting) -> None:
    """It was waited for, for ever: told neither the one nor the other."""
    host.want_workers(1)
    launcher, known = host.launcher(), host.known

    def and_then_asked() -> Any:
        found = known()
        host.want_workers(2)
        return found

    host.known = and_then_asked  # type: ignore[method-assign]
    launcher.kill()
    until(lambda: sum(host.pid_of(name) is not None for name in host.alive()) == 2)


def errors_told(host: Waiting) -> list[str]:
    """Of workers that were lost meanwhile, too, the host tells."""
    return [told.error for told in host.told if hasattr(told, "error")]


def test_a_launcher_that_can_not_be_started_is_tried_again_after_a_pause(
    host: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.want_workers(1)
    launcher, tried_at_s = host.launcher(), list[float]()

    def fails(*_: Any) -> None:
        tried_at_s.append(time.monotonic())
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(to_launcher, "fork_launcher", fails)
        launcher.kill()
        until(lambda: errors_told(host))
    assert errors_told(host) == ["3 launchers of processes ended at once"]
    pauses_s = [later - before for before, later in pairwise(tried_at_s)]
    assert len(pauses_s) == 2
    assert min(pauses_s) >= to_launcher.AGAIN_S


def test_an_added_node_is_known_before_its_keeper(
    host: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that died between the two left one that no successor could take over."""
    host.want_workers(1)
    host.worker("w0")
    asked: list[Any] = []
    monkeypatch.setattr(host._line, "ask", lambda message: not asked.append(message))
    host.add_node("n9")
    kept, started = [one for one in asked if not isinstance(one, KillProcess)][:2]
    assert isinstance(kept, KeepNodes)
    assert (kept.nodes["n9"]["alive"], started.node) == (True, "n9")


def test_after_thousands_of_processes_the_table_of_them_is_small() -> None:
    """After 2,500 it was no packet any more: no controller could take over."""
    ended = [Forked(f"w{n}", "worker", "n0", 1, 1, ended=True, code=-9) for n in range(1, 5000)]
    lives = [Forked(name, "worker", "n0", 1, 1) for name in ("w0", "w5000")]
    follows = Forked("controller of process 4711", "controller", "", 1, 1, ended=True)
    with socket.socket() as nobody_calls:
        order = Order("", forked=(lives[0], follows, *ended, lives[1]))
        launcher = Launcher(order, nobody_calls)
    known = tuple(launcher._forked.values())
    assert known == (lives[0], follows, *ended[-ENDED_KEPT:], lives[1])
    assert len(encode(ProcessTable(known, {}))) < PACKET_BYTES / 10
    assert [number_of(name) for name in ("w17", "controller of process 4711", "w")] == [
        17,
        4711,
        -1,
    ]


def known_to_a_launcher(folder: Path, born: list[Forked], ending: list[Forked]) -> list[Forked]:
    with socket.socket() as nobody_calls:
        launcher = Launcher(Order(str(folder), forked=tuple(born)), nobody_calls)
    for process in ending:
        launcher._ended(process)
    return list(launcher._forked.values())


def known_to_a_host(folder: Path, born: list[Forked], ending: list[Forked]) -> list[Forked]:
    host = LocalHost({"n0": 1})
    for process in born:
        host._know(process)
    for process in ending:
        host._on_end(replace(process, ended=True))
    return list(host.known()[0])


@pytest.mark.parametrize("known_to", [known_to_a_launcher, known_to_a_host])
def test_the_last_to_end_are_told_of_and_the_last_name(
    tmp_path: Path, known_to: Callable[..., Any]
) -> None:
    """A worker that lived longest was forgotten as it ended: the next controller, which may not
    have heard of that, waited for it. And no name may be used again."""
    born = [Forked(f"w{n}", "worker", "n0", 1, 1) for n in range(ENDED_KEPT + 4)]
    first, second, *middle, lives, newest = born
    known = known_to(tmp_path, born, [newest, second, *middle, first])
    expected = [newest, *middle[-ENDED_KEPT + 1 :], first]
    assert known == [lives, *(replace(one, ended=True) for one in expected)]


def test_with_its_owner_a_launcher_ends_and_all_workers(tmp_path: Path) -> None:
    program = f"""
import sys, time
from elastic_ft.hosts.local import LocalHost
from elastic_ft.transport.reception import listen
from elastic_ft.transport.tls import JobKey
if __name__ == "__main__":
    silent = listen("127.0.0.1")
    host = LocalHost({{"n0": 1}})
    host.start(print, silent.getsockname(), JobKey({KEY.secret!r}))
    host.want_workers(1)
    while not host.pid_of("w0"):
        time.sleep(0.01)
    print(host.pid_of("w0"), flush=True)
    time.sleep({DEADLINE_S})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        launcher = worker.parent()
        os.kill(worker.pid, signal.SIGSTOP)  # it sees nothing itself
        owner.kill()
    _, left = psutil.wait_procs([worker, launcher], DEADLINE_S)
    assert not left


def test_controllers_that_get_nowhere_are_not_followed_for_ever(tmp_path: Path) -> None:
    job, out = make_job(steps=5), tmp_path / "run"
    run, killed = DetachedRun(job, str(out), str(tmp_path / "checkpoints"), {}), set[int]()
    run.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while (ended := run.poll(0.05)) is None:
        assert time.monotonic() < deadline_s
        with contextlib.suppress(ProcessLookupError):
            for process in run.processes():
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGKILL)
    run.close()
    assert (len(killed), ended.code) == (5, 1)
    assert ended.line.startswith("5 controllers ended in a row without a step between them")
    assert (out / "processes.log").read_text().count("was killed by SIGKILL") == 5


def test_a_stop_is_heard_though_no_launcher_passes_it_on(tmp_path: Path) -> None:
    """It was dropped where the launcher was away just then, or ended with it."""
    out, folder = tmp_path / "run", tmp_path / "launcher"
    run = DetachedRun(make_job(steps=5), str(out), str(tmp_path / "checkpoints"), {})
    run._folder = folder
    run.stop()
    assert run.poll(0.0) is None
    assert not (out / "stop.json").exists(), "nobody has the job yet"
    owners.take_over(open_store(str(out)), job="job", run="first", run_folder=str(out))
    assert run.poll(0.0) is None
    assert json.loads((out / "stop.json").read_text()) == {"run": "first"}
    with listen_in(folder):  # one that imports, and is killed meanwhile
        assert run.poll(0.0) is None
        run.stop()
        assert not (out / "stop-now.json").exists()
    for _ in range(2):
        assert run.poll(0.0) is None
    assert json.loads((out / "stop-now.json").read_text()) == {"run": "first"}


def test_a_launcher_that_comes_too_late_never_comes(tmp_path: Path) -> None:
    """The job was said to have failed, and started all the same. It was 60 s, whatever the job
    said, and the line named a log that was not there."""
    stop_warm()
    before = set(psutil.Process().children())  # of other tests in this process
    job = make_job(steps=5, elastic={"start_timeout_s": 0.01})
    run = DetachedRun(job, str(tmp_path / "run"), str(tmp_path / "store"), {"n0": 1})
    try:
        with pytest.raises(JobFailed, match=r"^no launcher after 0.01 s \(.*start_timeout_s\)$"):
            run.start()
        assert set(psutil.Process().children()) <= before
        assert run._folder is not None
        assert not run._folder.exists()
    finally:
        stop_warm()
        run.close()


def test_an_interrupt_does_not_go_to_who_has_the_pid_of_a_controller_that_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger, socket.socket() as nobody_calls:
        launcher = Launcher(Order(""), nobody_calls)
        launcher._charge = Charge("controller0", stranger.pid)
        launcher._interrupt()
        launcher._pass_on_interrupts()
        assert launcher._interrupts == 1, "the next controller is to hear of it"
        stranger.kill()
    assert stranger.returncode == -signal.SIGKILL
