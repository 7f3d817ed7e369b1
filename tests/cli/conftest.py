"""Tiny jobs through the command line, in a folder of their own."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from elastic_ft.observe.run_folder import read_lines
from tests.cli.alone import Alone

DEADLINE_S = 240.0
MARK = "ELASTIC_FT_TEST"
JOB: dict[str, Any] = {
    "name": "tiny",
    "steps": 12,
    "model": {
        "preset": "decoder-1m",
        "kwargs": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32},
    },
    "data": {"url": "stdlib:", "vocab_size": 300, "sequence_length": 16, "max_tokens": 40_000},
    "batch": {"global_batch_size": 4, "micro_batch_size": 1},
    "elastic": {"min_workers": 1, "max_workers": 2, "gather_s": 60},
    "audit": True,
}
# A job that goes on until it is stopped: at full speed it would have the processors for as long as
# whoever is to stop it, or follows on its controller, imports.
ENDLESS: dict[str, Any] = {
    "steps": 100_000,
    "data": {"path": "chaos.jobs:Paced", "kwargs": {"pause_s": 0.02}},
}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path: Path, cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; this process's signal handlers are put back."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield tmp_path
    sys.path[:] = path
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def write_job(folder: Path, cache_dir: str) -> Callable[..., str]:
    def write(changes: dict[str, Any] | None = None) -> str:
        """JOB with the values at dotted paths replaced, as a file."""
        values = copy.deepcopy(JOB)
        values["data"]["cache_dir"] = cache_dir
        for path, value in (changes or {}).items():
            *sections, key = path.split(".")
            section = values
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = copy.deepcopy(value)  # later paths may lead into it
        (folder / "job.yaml").write_text(yaml.safe_dump(values))
        return "job.yaml"

    return write


class Command:
    """``elastic-ft`` in a process group of its own, as a shell starts it.

    What it starts has its mark in the environment: it may be nobody's child.
    """

    program: tuple[str, ...] = ("-m", "elastic_ft")

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *self.program, *arguments],
            cwd=folder,
            env=os.environ | {MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # not nohup's
        )

    def finish(self, within_s: float = DEADLINE_S) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err

    def until_step(self, step: int, run: str = "runs/tiny") -> None:
        path, deadline_s = self.folder / run / "steps.jsonl", time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not (lines := read_lines(path)) or lines[-1]["step"] < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s, f"no step {step}: {lines[-1:]}"
            pause.wait(0.02)

    def interrupt(self) -> None:
        """Ctrl C at a terminal: everyone in the foreground gets it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """Itself, and all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.communicate()

    def left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return [process for process in found if process.pid != self.process.pid]

    def has(self, title: str, besides: int) -> bool:
        return any(title_of(p) == title and p.pid != besides for p in self.left())

    def named(self, title: str) -> psutil.Process:
        """The newest of its processes that ``ps`` calls so."""
        found = [process for process in self.left() if title_of(process) == title]
        assert found, [(process.pid, title_of(process)) for process in self.left()]
        return max(found, key=lambda process: (process.create_time(), process.pid))


def title_of(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    with Alone() as scripts:
        yield scripts


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def begin(*arguments: str) -> Command:
        commands.append(Command(folder, *arguments))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()
