"""A shared cache of tokenised data, and a leak check after every test."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # plain `pytest`, where `python -m pytest` would have it
    sys.path.insert(0, str(ROOT))

from tests.multiproc import harness, pool  # noqa: E402

LEAK_DEADLINE_S = 30.0
FSSPEC = ("fsspecIO", "asyncio_")  # its loop and resolver: they stay
SERVERS = ("forkserver", "resource_tracker", "hosts.local.launcher", "mount_helper")  # they stay


@pytest.fixture(scope="session", autouse=True)
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenises once for the session, in a private place."""
    harness.CORPUS["cache_dir"] = str(tmp_path_factory.mktemp("cache"))
    harness.dataset_size(harness.make_job())


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fails a test after which a process of ours, or a thread, is left."""
    before = {thread.ident for thread in threading.enumerate()}
    yield
    deadline = time.monotonic() + LEAK_DEADLINE_S
    while left := [*_processes(), *_threads(before)]:
        assert time.monotonic() < deadline, f"left behind: {'; '.join(left)}"
        time.sleep(0.05)


def _processes() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            is_server = any(name in line for name in SERVERS) and _is_direct(process)
            stays = is_server or process.pid in pool.KEPT
            if process.status() != psutil.STATUS_ZOMBIE and not stays:
                found.append(f"process {process.pid}: {line[:80]}")
        except psutil.NoSuchProcess:
            continue
    return found


def _is_direct(process: psutil.Process) -> bool:
    return process.ppid() == os.getpid()


def _threads(before: set[int | None]) -> list[str]:
    fresh = (t for t in threading.enumerate() if t.ident not in before)
    return [f"thread {t.name}" for t in fresh if not t.name.startswith(FSSPEC)]
