"""Scripts without a launcher, each in a process that is forked from one that has imported.

A script is the main module, and its interpreter ends as after `python script`; only its path, and
the seed of str's hashes, are the process's that has imported.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0  # under any test's
ANSWER_BYTES = 64
PROGRAM = """
import gc, json, os, socket, sys
sys.path[:] = json.loads(sys.argv[2])
import elastic_ft.training.alone, elastic_ft.worker.preload
from elastic_ft.worker.forked import draw_apart
gc.freeze()
line = socket.socket(fileno=int(sys.argv[1]))
while True:
    given, handles, _, _ = socket.recv_fds(line, 1 << 20, 2)
    if not given:
        os._exit(0)
    if (pid := os.fork()) == 0:
        break
    for handle in handles:
        os.close(handle)
    line.send(b"%d" % pid)
    line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
line.close()
for number, handle in enumerate(handles):
    os.dup2(handle, number + 1)
    os.close(handle)
folder, sys.argv[:], environment = json.loads(given)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
draw_apart()
__file__ = sys.argv[0]
sys.path.insert(0, os.path.dirname(__file__))
exec(compile(open(__file__).read(), __file__, "exec"))
"""


class Alone:
    """A context manager: the process from which scripts are forked, one after the other."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(DEADLINE_S)
        path = json.dumps([str(ROOT), *sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), path],
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.wait(DEADLINE_S)

    def __call__(self, folder: Path, *command: str | Path) -> tuple[int, list[str], list[str]]:
        """Runs a script with its arguments in ``folder``. Returns its exit code, and the lines of
        its stdout and stderr. Raises TimeoutError, and ends it, if that takes too long."""
        outs = [folder / "stdout", folder / "stderr"]
        code = self._run(folder, list(map(str, command)), outs)
        out, err = (path.read_text().splitlines() for path in outs)
        return code, out, err

    def _run(self, folder: Path, command: Sequence[str], outs: Sequence[Path]) -> int:
        handles = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in outs]
        pid = None
        try:
            given = json.dumps([str(folder), command, dict(os.environ)]).encode()
            socket.send_fds(self._line, [given], handles)
            pid = int(self._line.recv(ANSWER_BYTES))
            return int(self._line.recv(ANSWER_BYTES))
        except BaseException:  # a test's own deadline, too: what comes late is no other script's
            for process in filter(None, [pid, self._process.pid]):
                os.kill(process, signal.SIGKILL)
            self._process.wait(DEADLINE_S)
            self._line.close()
            self._start()
            raise
        finally:
            for handle in handles:
                os.close(handle)
