"""What workers on plain processes have of the process that starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.hosts import local

DEADLINE_S = 60.0


def tell(*arguments: Any) -> None:
    """As ``_worker_process`` begins; writes down what it finds."""
    *_, environment, parent = arguments
    local._follow(parent, environment)
    mask = sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    Path(os.environ["TELL"]).write_text(json.dumps({"env": dict(os.environ), "mask": mask}))


def test_workers_have_the_environment_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their server may be older: a store's endpoint was set after it, and none of them knew."""
    monkeypatch.setenv("OF_BEFORE", "1")
    local.start_fork_server()
    monkeypatch.delenv("OF_BEFORE")
    monkeypatch.setenv("TELL", str(tmp_path / "told"))
    host = local.LocalHost({"n0": 1}, {"OF_THE_JOB": "2"})
    process = host._start(tell, "w0", host._nodes["n0"])
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    told = json.loads((tmp_path / "told").read_text())
    assert "OF_BEFORE" not in told["env"]
    assert told["env"]["OF_THE_JOB"] == "2"
    assert told["mask"] == []


def test_an_interrupt_of_the_terminal_does_not_reach_a_server_that_imports() -> None:
    """It died of it, with a traceback, where the checks had ended quietly."""
    program = """
import os, signal, sys
from multiprocessing import forkserver
from elastic_ft.hosts import local
local.start_fork_server()
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)
local.start_fork_server()
status = open(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print(bool(blocked & 1 << signal.SIGINT - 1), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
local.kill_fork_server()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["True", "set()"], "")
