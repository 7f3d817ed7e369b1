"""Who starts a launcher where it died together with the controller: a keeper of the run.

A launcher notes in its folder what the next one needs. A keeper whose controller has ended, or
makes no sign of life, looks whether the launcher answers; if nobody does, it starts another one,
which takes over who lives, and starts the controller that adopts them. Of several keepers one does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_ft.errors import StoreFailed
from elastic_ft.hosts.local import orders
from elastic_ft.hosts.local.warm import fork_launcher, stop_warm
from elastic_ft.observe import alive, scratch
from elastic_ft.transport.messages import Messages, encode

log = logging.getLogger(__name__)
NOTE, LOCK = "order", "lock"  # files in a launcher's folder
LOOK_S = 0.5
LAUNCHER_S = 60.0  # for one to be there: it imports torch
SIGN_S = 1.0  # between two signs that somebody sees to it


@dataclass(frozen=True, slots=True)
class LauncherNote:
    """What a launcher would tell the next one: its order, with all processes as they are now.

    ``pid``, ``ticks``: its own.
    """

    order: orders.Order
    pid: int
    ticks: int

    @property
    def lives(self) -> bool:
        return bool(self.ticks) and orders.ticks_of(self.pid) == self.ticks

    def kill(self) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


NOTES = Messages(LauncherNote)


def note(order: orders.Order) -> None:
    """Of this launcher, for its user's eyes alone. Raises OSError."""
    folder = Path(order.folder)
    content = encode(LauncherNote(order, os.getpid(), orders.ticks_of(os.getpid())))
    swap = folder / f"{NOTE}.tmp"
    with os.fdopen(os.open(swap, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    swap.replace(folder / NOTE)


def forget_launcher(order: orders.Order) -> None:
    """The run has ended: no launcher follows."""
    (Path(order.folder) / NOTE).unlink(missing_ok=True)


def read_note(folder: Path) -> LauncherNote | None:
    """None: there is nothing to go on with."""
    try:
        found = NOTES.decode((folder / NOTE).read_bytes())
    except (OSError, EOFError):
        return None
    return found if isinstance(found, LauncherNote) else None


def answers(folder: Path, timeout_s: float) -> bool | None:
    """Whether the launcher of ``folder`` does, in time. None: nobody listens there."""
    try:
        line = orders.call_in(folder)
    except OSError:
        return None
    try:
        line.send(orders.Attend("watcher", os.getpid()))
        return line.receive(timeout_s) is not None
    except EOFError:
        return True  # it ended just now: the next look says more
    finally:
        line.close()


class Guard(threading.Thread):
    """Of a keeper's process.

    Args:
        folder: the launcher's.
        timeout_s: for one that runs to answer.
        is_alone: whether the controller has ended, or is silent, and another is looked for.
    """

    def __init__(self, folder: Path, timeout_s: float, is_alone: Callable[[], bool]) -> None:
        super().__init__(name="guard", daemon=True)
        self._folder, self._timeout_s, self._is_alone = folder, timeout_s, is_alone
        self._pause = threading.Event()

    def run(self) -> None:
        while not self._pause.wait(LOOK_S):
            if self._is_alone():
                try:
                    self._look()
                except OSError as error:
                    log.warning("no launcher can be started: %s", error)

    def _look(self) -> None:
        known = read_note(self._folder)
        if known is None or known.order.run is None:
            return
        heard = answers(self._folder, self._timeout_s if known.lives else LAUNCHER_S)
        if heard or not self._is_alone():
            return
        with self._alone() as is_ours:
            if not is_ours or read_note(self._folder) != known:
                return
            is_silent = heard is False and known.lives  # one that is being started takes its time
            is_gone = heard is None and not known.lives
            if not is_silent and not is_gone:
                return
            if is_gone and answers(self._folder, 0.0) is not None:
                return  # another keeper was first
            known.kill()
            self._start(known)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other keeper is at it."""
        with (self._folder / LOCK).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _start(self, known: LauncherNote) -> None:
        log.warning("launcher and controller are gone: a keeper starts another launcher")
        scratch.claim(self._folder)
        with orders.listen_in(self._folder) as listener:
            fork_launcher(replace(known.order, in_charge=""), listener)
        assert known.order.run is not None
        over = threading.Event()
        sign = threading.Thread(target=_show_signs, args=(known.order.run.out, over), daemon=True)
        sign.start()
        try:
            answers(self._folder, LAUNCHER_S)
        finally:
            over.set()
            stop_warm()


def _show_signs(out: str, over: threading.Event) -> None:
    """Who looks at the run folder is not to take the job for dead meanwhile."""
    while not over.is_set():
        with contextlib.suppress(OSError, StoreFailed):
            alive.show(out)
        over.wait(SIGN_S)
