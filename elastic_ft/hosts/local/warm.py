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
from elastic_ft.hosts.local.orders import TO_WARM, Order, Packets

ENVIRONMENT = WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
PROGRAM = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
PROGRAM += "import elastic_ft.worker.birth; "  # it tells when this began
PROGRAM += "from elastic_ft.hosts.local.launcher import main; main(int(sys.argv[1]))"


class WarmProcess:
    """There is at most one of a process."""

    def __init__(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # While it imports, it would die of the terminal's interrupt, with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                    env=dict(os.environ) | environment,
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

    def fork(self, order: Order, listener: socket.socket) -> bool:
        return self._line.send(order, listener.fileno())

    def kill(self) -> None:
        """At once, whatever it imports."""
        self._line.close()
        self._process.kill()
        self._process.wait()


_warm: WarmProcess | None = None
_starting = threading.Lock()


def start_warm(environment: dict[str, str] = ENVIRONMENT) -> bool:
    """Returns at once, whether one was started; does nothing where one lives already."""
    global _warm
    with _starting:
        if _warm is not None and _warm.lives:
            return False
        _warm = WarmProcess(environment)
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
        if _warm is not None and _warm.fork(order, listener):
            return
    stop_warm()  # it was killed just now
    start_warm()
    with _starting:
        if _warm is None or not _warm.fork(order, listener):
            raise OSError("no process can be started from which workers fork")
