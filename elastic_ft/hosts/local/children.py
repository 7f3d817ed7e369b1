"""What a process of a run does between its launcher's fork and its end."""

from __future__ import annotations

# First: a worker tells when what it is made of was imported, and from when.
from elastic_ft.worker import preload  # isort: skip
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from elastic_ft.hosts.local import in_charge
from elastic_ft.hosts.local.guard import Guard
from elastic_ft.hosts.local.orders import Order, StartProcess
from elastic_ft.keeper.node_keeper import NodeKeeper
from elastic_ft.transport.title import set_title
from elastic_ft.worker import birth
from elastic_ft.worker.forked import draw_apart
from elastic_ft.worker.this_process import member_here, run_worker

INTERRUPTS = in_charge.INTERRUPTS

log = logging.getLogger(__name__)

__all__ = ["Prepared", "controller", "fork", "keeper", "preload", "worker"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """``handles``: open files of the launcher's: their other ends must see its end."""

    environment: dict[str, str]
    path: tuple[str, ...]
    handles: list[int]


def fork(prepared: Prepared, run: Callable[[], object]) -> int:
    """Returns the pid of a process that does ``run``, with INTERRUPTS blocked, and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)  # they have our handlers still
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    _live(prepared, run)


def _live(prepared: Prepared, run: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError, ValueError):  # stderr may be no file
            faulthandler.enable(all_threads=False)  # as Ray does: a segfault says where
        for handle in prepared.handles:
            with contextlib.suppress(OSError):
                os.close(handle)
        os.environ.clear()  # the launcher's is of an earlier time
        os.environ.update(prepared.environment)
        sys.path[:] = prepared.path
        birth.forked()
        draw_apart()
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any Python process
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ignore_interrupts() -> None:
    """They may reach the whole process group, and the controller decides how to stop."""
    for interrupt in INTERRUPTS:
        signal.signal(interrupt, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def worker(start: StartProcess) -> None:
    _ignore_interrupts()
    set_title(f"ef-worker {start.name}")
    member = member_here(start.name, start.node, os.uname().nodename)
    called: list[bool] = []
    try:
        run_worker(start.address, start.key, member, on_called=lambda: called.append(True))
    except (EOFError, OSError) as error:
        if called:
            raise
        log.warning(
            "worker %s ends: its controller is gone, and never answered: %s", start.name, error
        )
        raise SystemExit(1) from error


def keeper(start: StartProcess, folder: Path) -> None:
    """``folder``: the launcher's."""
    _ignore_interrupts()
    set_title(f"ef-keeper {start.node}")
    with contextlib.suppress(EOFError, OSError):  # the controller was gone before it was reached
        keeping = NodeKeeper(start.address, start.key, start.node, "127.0.0.1")
        Guard(folder, keeping.timeout_s, lambda: keeping.is_alone).start()
        keeping.serve()


def controller(order: Order, is_first: bool) -> None:
    set_title("ef-controller")
    in_charge.run_controller(order, Path(order.folder), is_first)
