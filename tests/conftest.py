"""For every tier: what the tests started is gone when they end."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before torch is imported. Of tensors as small as here two threads make nothing faster, and while
# sessions share the processors, one that waits for the other spins for most of what a test takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all is collected: what is imported for it, such as torch, is here to stay

import psutil  # noqa: E402
import pytest  # noqa: E402

from tests.browser import browser  # noqa: E402

__all__ = ["browser"]

LEAK_DEADLINE_S = 30.0
# As long as we do.
STAY = (
    *("multiprocessing.forkserver", "multiprocessing.resource_tracker"),
    *("hosts.local.launcher", "storage.mount_helper"),
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """No search for garbage looks at what was imported, now or later."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Nor does the one at Python's end, where all memory is given back in any case."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fails a session that leaves processes behind, and names them."""
    _, left = psutil.wait_procs(_started(), timeout=LEAK_DEADLINE_S)
    if left:
        names = "; ".join(_describe(process) for process in left)
        print(f"\nprocesses left behind: {names}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _started() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if not any(s in _describe(process) for s in STAY)]


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:300]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"
