"""What the processes of a run have of the one that they are forked from."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elastic_ft.hosts.local import children, in_charge
from elastic_ft.hosts.local.orders import StartProcess, call_in, listen_in
from elastic_ft.transport.tls import new_key
from tests.oneproc.test_launcher import DEADLINE_S


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


def test_a_worker_whose_controller_is_gone_says_so_in_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A superseded controller's last worker ended with a traceback in the user's terminal."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = ("127.0.0.1", gone.getsockname()[1])
    start = StartProcess("w0.1", "worker", "n0", address, new_key(tls=False))

    def run() -> None:
        logging.getLogger().handlers.clear()  # pytest's
        children.worker(start)

    pid = children.fork(children.Prepared(dict(os.environ), tuple(sys.path), []), run)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "worker w0.1 ends: its controller is gone" in line, line


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
