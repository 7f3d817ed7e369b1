"""A job on plain processes that nobody owns, as the process sees it that has started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic_ft.config import Job
from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import orders
from elastic_ft.hosts.local.guard import read_note
from elastic_ft.hosts.local.to_launcher import FOLDER
from elastic_ft.hosts.local.warm import fork_launcher, stop_warm
from elastic_ft.observe import scratch, stop_request
from elastic_ft.observe.alive import Vigil
from elastic_ft.observe.lines import local_path
from elastic_ft.transport.tls import new_key

LOG = "processes.log"
ANSWER_S = 5.0
CALL_AGAIN_S = 0.1  # where a launcher was killed: its controller starts another one in its place


class DetachedRun:
    """Its launcher and all that it forks live on when this process ends.

    Args:
        nodes: name -> slots.

    Attributes:
        log: where its processes write what nobody reads at a terminal.
    """

    def __init__(
        self,
        job: Job,
        out: str,
        checkpoint_url: str,
        nodes: dict[str, int],
        faults: tuple[PointFault, ...] = (),
        accept_changes: bool = False,
    ) -> None:
        self.log = _log_of(out, job.name)
        self._run = orders.LocalRun(
            job,
            out,
            checkpoint_url,
            nodes,
            new_key(tls=job.network.tls),
            self.log,
            faults,
            accept_changes,
        )
        self._folder: Path | None = None
        self._line: orders.Packets | None = None
        self._outcome: orders.RunEnded | None = None
        self._vigil: Vigil | None = None  # while no launcher answers
        self._stops, self._unheard = 0, False  # ``_unheard``: by whoever passes it on

    def start(self) -> None:
        """Returns once the launcher is there. Raises JobFailed."""
        folder = self._folder = scratch.make(FOLDER)
        order = orders.Order(str(folder), None, dict(os.environ), tuple(sys.path), self._run)
        with orders.listen_in(folder) as listener:
            fork_launcher(order, listener)
        try:
            self._line = _watch(folder)
            within_s = self._run.job.elastic.start_timeout_s  # it imports torch
            if not self._line.receive(within_s):
                said = f"; {self.log} may say why" if Path(self.log).exists() else ""
                raise JobFailed(f"no launcher after {within_s:g} s (elastic.start_timeout_s){said}")
        except (OSError, EOFError) as error:
            self._give_up(folder)
            raise JobFailed(f"the launcher ended at once ({error}); see {self.log}") from error
        except JobFailed:
            self._give_up(folder)
            raise
        stop_warm()

    def _give_up(self, folder: Path) -> None:
        """What has not begun by now never does: a job that was said to have failed."""
        stop_warm()
        self.close()
        shutil.rmtree(folder, ignore_errors=True)

    def poll(self, timeout_s: float) -> orders.RunEnded | None:
        """How it has ended; None: it has not, within ``timeout_s``, as far as is known."""
        self._ask_in_folder()
        try:
            if self._line is None:
                time.sleep(min(timeout_s, CALL_AGAIN_S))
                assert self._folder is not None
                self._line = _watch(self._folder)
            message = self._line.receive(timeout_s)
        except (EOFError, OSError):
            self.close()
            # Of a launcher that has ended nobody knows whether it has passed it on.
            self._unheard |= self._stops > 0 and self._outcome is None
            self._vigil = self._vigil or Vigil(self._run.out)
            if (dead := self._vigil.look()) and self._outcome is None:  # nobody starts another
                self._outcome = orders.RunEnded(1, dead)
            return self._outcome
        self._vigil = None
        if isinstance(message, orders.RunEnded):
            self._outcome = message
        return self._outcome

    def stop(self) -> None:
        """In good order; the second time: at once. Without a launcher: by the run folder, from
        which a controller takes the same request no second time."""
        self._stops += 1
        if self._line is None or not self._line.send(orders.Interrupt()):
            self._unheard = True

    def _ask_in_folder(self) -> None:
        if self._unheard:
            with contextlib.suppress(StoreFailed):  # asked again when it is looked at next
                self._unheard = not stop_request.ask_to_stop(self._run.out, now=self._stops > 1)

    def processes(self) -> list[orders.Forked]:
        """All that are alive. Raises ProcessLookupError where no launcher tells."""
        return [process for process in self._asked().forked if orders.lives(process)]

    def nodes(self) -> list[str]:
        """Names of those alive, oldest first. Raises ProcessLookupError likewise."""
        return [name for name, node in self._asked().nodes.items() if node["alive"]]

    def ask(self, request: orders.NodeRequest) -> None:
        """Returns once it is seen to. Raises ProcessLookupError where nobody in charge does."""
        until_s = time.monotonic() + ANSWER_S
        self._asked(request)
        while not _is_done(request, self._asked().nodes):
            if time.monotonic() > until_s:
                raise ProcessLookupError(f"nobody is in charge to {request.what} {request.node}")
            time.sleep(CALL_AGAIN_S)

    def _asked(self, request: orders.NodeRequest | None = None) -> orders.ProcessTable:
        if self._folder is None:
            raise ProcessLookupError("it was not started yet")
        try:
            line = _watch(self._folder)
            try:
                table = line.receive(ANSWER_S)
                if request is not None:
                    line.send(request)
            finally:
                line.close()
        except (EOFError, OSError) as error:
            raise ProcessLookupError(f"no launcher answers: {error}") from error
        if not isinstance(table, orders.ProcessTable):
            raise ProcessLookupError("no launcher answers")
        return table

    def launcher_pid(self) -> int:
        """Raises ProcessLookupError."""
        known = read_note(self._folder) if self._folder is not None else None
        if known is None or not known.lives:
            raise ProcessLookupError("no launcher is running")
        return known.pid

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None


def _is_done(request: orders.NodeRequest, nodes: dict[str, Any]) -> bool:
    node = nodes.get(request.node)
    if node is None:
        return False
    done = {"add": True, "kill": not node["alive"], "drain": node["draining"]}
    return bool(done[request.what])


def _watch(folder: Path) -> orders.Packets:
    line = orders.call_in(folder)
    line.send(orders.Attend("watcher", os.getpid()))
    return line


def _log_of(out: str, name: str) -> str:
    folder = local_path(out)
    if folder is None:
        handle, path = tempfile.mkstemp(prefix=f"elastic_ft_{name}_", suffix=".log")
        os.close(handle)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    return str((folder / LOG).absolute())
