"""A process that has imported what workers and controllers need: launchers fork from it.

So a worker is there in 0.3 s, not in 5. It belongs to the process that has started it and ends with
that; launchers of detached runs live on. Who knows early that there will be workers starts it then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.hosts.local.orders import TO_WARM, ForkedCall, Order, Packets

ENVIRONMENT = WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
PROGRAM = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
PROGRAM += "from elastic_ft.worker import birth, forked\n"  # first: it tells when this began
PROGRAM += "with forked.imported_for_all(): from elastic_ft.hosts.local.launcher import main\n"
PROGRAM += "main(int(sys.argv[1]))"


class WarmProcess:
    """There is at most one of a process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # While it imports, it would die of the terminal's interrupt, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                    env=dict(os.environ) | ENVIRONMENT,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._line = Packets(ours, TO_WARM)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def fork(self, order: Order | ForkedCall, handle: int) -> bool:
        return self._line.send(order, handle)

    def kill(self) -> None:
        """At once, whatever it imports."""
        self._line.close()
        self._process.kill()
        self._process.wait()


_warm: WarmProcess | None = None
_starting = threading.Lock()


def start_warm() -> bool:
    """Returns at once, whether one was started; does nothing where one lives already."""
    global _warm
    with _starting:
        if _warm is not None and _warm.lives:
            return False
        _warm = WarmProcess()
        return True


def stop_warm() -> None:
    global _warm
    with _starting:
        if _warm is not None:
            _warm.kill()
        _warm = None


def fork_launcher(order: Order, listener: socket.socket) -> None:
    """As soon as the warm process has imported. Raises OSError if none can be started."""
    start_warm()
    with _starting:
        if _warm is not None and _warm.fork(order, listener.fileno()):
            return
    stop_warm()  # it was killed just now
    start_warm()
    with _starting:
        if _warm is None or not _warm.fork(order, listener.fileno()):
            raise OSError("no process can be started from which workers fork")


def warm_pid() -> int:
    """0: there is none."""
    with _starting:
        return _warm.pid if _warm is not None else 0


def ask_warm(call: ForkedCall, handle: int) -> bool:
    """Whether there is a warm process, and it takes ``call`` on; ``handle`` is for the answer."""
    with _starting:
        return _warm is not None and _warm.lives and _warm.fork(call, handle)
