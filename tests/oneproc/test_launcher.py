"""Who forks the processes of a run on this machine, and what they have of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from elastic_ft.errors import JobFailed
from elastic_ft.hosts.local import LocalHost, children, detached, in_charge, to_launcher
from elastic_ft.hosts.local.detached import DetachedRun
from elastic_ft.hosts.local.launcher import Charge, Launcher, serve
from elastic_ft.hosts.local.orders import (
    ENDED_KEPT,
    PACKET_BYTES,
    TO_LAUNCHER,
    Attend,
    Forked,
    KeepNodes,
    KillProcess,
    LocalRun,
    Order,
    Packets,
    ProcessTable,
    Role,
    RunEnded,
    call_in,
    listen_in,
    number_of,
)
from elastic_ft.hosts.local.to_launcher import ToLauncher
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
    stop_warm()


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


def test_a_launcher_that_comes_too_late_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was said to have failed, and started all the same."""
    stop_warm()
    before = set(psutil.Process().children())  # of other tests in this process
    monkeypatch.setattr(detached, "LAUNCHER_S", 0.0)
    run = DetachedRun(make_job(steps=5), str(tmp_path / "run"), str(tmp_path / "store"), {"n0": 1})
    try:
        with pytest.raises(JobFailed, match="no launcher after 0 s"):
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


class Scripted:
    """A run's launcher, in a process of its own, whose controllers do what the test says."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = tmp_path / "launcher", tmp_path / "log"
        self._patch, self.pid, out = monkeypatch, 0, str(tmp_path / "run")
        run = LocalRun(make_job(steps=5), out, out, {"n0": 1}, KEY, str(self.log))
        self.order = Order(str(self.folder), None, dict(os.environ), tuple(sys.path), run)

    def start(self, controller: Callable[[Order, bool], Any]) -> Packets:
        with listen_in(self.folder) as listener:
            return self.serve(controller, listener)

    def serve(self, controller: Callable[[Order, bool], Any], listener: socket.socket) -> Packets:
        """Returns the line of a watcher."""
        self._patch.setattr(children, "controller", controller)
        watcher = self.call("watcher")
        self.pid = os.fork()
        if not self.pid:
            serve(self.order, listener)
        return watcher

    def call(self, role: Role) -> Packets:
        line = call_in(self.folder)
        line.send(Attend(role, os.getpid()))
        return line

    def has(self, state: str) -> bool:
        return psutil.Process(self.pid).status() == state

    def ended(self, watcher: Packets) -> Any:
        """What the watcher hears of the end."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not isinstance(message := watcher.receive(1.0), RunEnded):
            assert time.monotonic() < deadline_s
        return message

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    made = Scripted(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("is_followed", [True, False])
def test_who_stood_still_while_a_keeper_saw_to_the_run_starts_no_launcher(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, is_followed: bool
) -> None:
    """Two launchers had one run, and the run was told as failed while it trained."""
    started: list[Order] = []

    def start(order: Order, listener: socket.socket) -> None:
        started.append(order)
        raise OSError("as if there were none")

    monkeypatch.setattr(to_launcher, "fork_launcher", start)
    monkeypatch.setattr(to_launcher, "AGAIN_S", 0.1)
    heard = SimpleNamespace(known=lambda: ((), {}), hear=lambda _: None, gave_up=lambda _: None)
    line = ToLauncher(heard, scripted.order)
    with listen_in(scripted.folder) as first:
        joining = threading.Thread(target=line.join)
        joining.start()
        launcher = Packets(first.accept()[0], TO_LAUNCHER)
        launcher.send(ProcessTable((), {}))
        joining.join(DEADLINE_S)
    with listen_in(scripted.folder) if is_followed else contextlib.nullcontext():
        launcher.close()
        until(lambda: line._departed or started)
        line.depart(RunEnded(1) if is_followed else None)
    assert bool(started) is not is_followed


@pytest.mark.parametrize("is_accepted", [True, False])
def test_last_words_count_that_are_read_after_the_end(
    scripted: Scripted, is_accepted: bool
) -> None:
    """A job that was stopped began again, where its launcher slept through the last moments."""

    def controller(order: Order, is_first: bool) -> None:
        line = scripted.call("controller") if is_accepted else None
        if line is not None:
            line.receive(DEADLINE_S)
        if is_first:
            os.kill(os.getppid(), signal.SIGSTOP)
        line = line or scripted.call("controller")
        line.send(RunEnded(0, "stopped" if is_first else "begun again"))

    watcher = scripted.start(controller)
    until(lambda: scripted.has(psutil.STATUS_STOPPED))
    (child,) = psutil.Process(scripted.pid).children()
    until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    os.kill(scripted.pid, signal.SIGCONT)
    assert scripted.ended(watcher).line == "stopped"


def test_last_words_count_that_a_new_launcher_finds(scripted: Scripted) -> None:
    """Its controller starts it, and may end while it imports."""
    gone = Forked("controller0", "controller", "", os.getpid(), 1)
    scripted.order = replace(scripted.order, forked=(gone,), in_charge=gone.name)

    def controller(order: Order, is_first: bool) -> None:
        scripted.call("controller").send(RunEnded(0, "begun again"))

    with listen_in(scripted.folder) as listener:
        scripted.call("controller").send(RunEnded(0, "stopped"))
        watcher = scripted.serve(controller, listener)
    assert scripted.ended(watcher).line == "stopped"


def test_a_launcher_that_wakes_up_to_much_news_waits_for_none(scripted: Scripted) -> None:
    """What it had been told of a connection that it then closed was taken for the end of the next
    controller, which had got its number: that end was waited for, and nobody was answered."""

    def controller(order: Order, is_first: bool) -> None:
        line = scripted.call("controller")
        line.receive(DEADLINE_S)
        scripted.folder.with_name(order.in_charge).touch()
        line.receive(DEADLINE_S)  # until it is killed

    def processes() -> dict[str, Forked]:
        line = scripted.call("watcher")
        table = line.receive(WOKEN_S)
        line.close()
        assert isinstance(table, ProcessTable), "nobody is answered"
        return {one.name: one for one in table.forked}

    scripted.start(controller).receive(DEADLINE_S)
    process = psutil.Process(scripted.pid)
    (first,) = process.children()
    until(scripted.folder.with_name("controller0").exists)
    process.suspend()
    callers = [scripted.call("watcher") for _ in range(2)]
    first.kill()
    until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    process.resume()
    for caller in callers:
        assert isinstance(caller.receive(WOKEN_S), ProcessTable)
    until(lambda: "controller1" in processes())
    psutil.Process(processes()["controller1"].pid).kill()
    until(lambda: "controller2" in processes())
    psutil.Process(processes()["controller2"].pid).kill()


def test_signals_that_come_together_are_one_request_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service manager's SIGTERM came three times: it was "at once", with no checkpoint."""
    now_s, reasons = 100.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    requests = in_charge.StopRequests()
    requests.hear(signal.SIGTERM, None)
    now_s += 0.5
    requests.hear(signal.SIGINT, None)
    assert reasons == [], "there is no controller yet"
    requests.lead_to(SimpleNamespace(stop=reasons.append))
    requests.hear(signal.SIGINT, None)
    assert reasons == ["interrupted"]
    now_s += in_charge.SAME_S
    requests.hear(signal.SIGINT, None)
    assert reasons == ["interrupted", "interrupted"], "asked twice"


def test_workers_have_the_environment_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they fork from may be older: a store's endpoint was set after it, and none knew."""
    monkeypatch.setenv("OF_BEFORE", "1")
    told = tmp_path / "told"

    def tell() -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        told.write_text(json.dumps([dict(os.environ), sorted(map(int, mask))]))

    reads, writes = os.pipe()
    prepared = children.Prepared({"OF_THE_JOB": "2"}, tuple(sys.path), [writes])
    pid = children.fork(prepared, tell)
    os.close(writes)
    assert os.read(reads, 1) == b"", "the child has not kept it open"
    os.close(reads)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert json.loads(told.read_text()) == [{"OF_THE_JOB": "2"}, [*children.INTERRUPTS]]


def test_processes_that_are_forked_draw_apart(tmp_path: Path) -> None:
    """All workers of all jobs drew the same from numpy's global generator."""

    def draw(name: str) -> None:
        (tmp_path / name).write_text(str(np.random.random()))

    pids = [
        children.fork(children.Prepared(dict(os.environ), (), []), partial(draw, name))
        for name in ("first", "second")
    ]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert (tmp_path / "first").read_text() != (tmp_path / "second").read_text()


def test_an_interrupt_that_comes_right_after_the_fork_is_heard(tmp_path: Path) -> None:
    """It was ignored until the controller had its handlers, and the job went on."""
    heard, (reads, writes) = tmp_path / "heard", os.pipe()

    def run() -> None:
        os.read(reads, 1)
        requests = in_charge.StopRequests()
        requests.listen()
        requests.lead_to(SimpleNamespace(stop=lambda reason: heard.write_text(reason)))  # type: ignore[arg-type]

    pid = children.fork(children.Prepared(dict(os.environ), tuple(sys.path), [writes]), run)
    os.kill(pid, signal.SIGTERM)
    os.write(writes, b".")
    for handle in (reads, writes):
        os.close(handle)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert heard.read_text() == "interrupted"


def test_an_interrupt_of_the_terminal_does_not_reach_a_process_that_imports() -> None:
    """It died of it, with a traceback, where the checks had ended quietly."""
    program = """
import os, signal
from elastic_ft.hosts.local import warm
warm.start_warm()
pid = warm._warm.pid
os.kill(pid, signal.SIGINT)
status = open(f"/proc/{pid}/status").read()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print(bool(blocked & 1 << signal.SIGINT - 1), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
warm.stop_warm()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["True", "set()"], "")


def test_a_folder_may_lie_deep(tmp_path: Path) -> None:
    """A path to a socket has room for some 100 characters."""
    folder = tmp_path / ("deep" * 40)
    with listen_in(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        call_in(folder).close()
