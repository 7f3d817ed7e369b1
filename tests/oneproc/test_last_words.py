"""A scripted launcher: what its last words are worth to who is in charge."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from elastic_ft.hosts.local import children, to_launcher
from elastic_ft.hosts.local.launcher import serve
from elastic_ft.hosts.local.orders import (
    TO_LAUNCHER,
    Attend,
    Forked,
    LocalRun,
    Order,
    Packets,
    ProcessTable,
    Role,
    RunEnded,
    call_in,
    listen_in,
)
from elastic_ft.hosts.local.to_launcher import ToLauncher
from tests.multiproc.harness import make_job
from tests.oneproc.test_launcher import DEADLINE_S, KEY, WOKEN_S
from tests.waiting import until


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
