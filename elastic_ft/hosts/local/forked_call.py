"""A function of what lies above this, called in a process that is forked from the warm one.

So who asks need not import torch for its answer: the warm process does that in any case.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from elastic_ft.config import Job
from elastic_ft.errors import UsageError
from elastic_ft.hosts.local.orders import ForkedCall, Order, is_stopped
from elastic_ft.hosts.local.warm import ask_warm, stop_warm, warm_pid
from elastic_ft.worker.forked import draw_apart

LENGTH = struct.Struct("<Q")  # of an answer, before it; and before that the pid of who answers
LOOK_S = 1.0
STOPPED_LOOKS = 5  # in a row, of whoever is to answer and stands still (SIGSTOP)
PIECE_BYTES = 1 << 20
FORK_S = 300.0  # for the warm process to import and fork: it takes seconds


def call_forked(function: str, job: Job) -> Any:
    """What ``function``, "module:name", returns of ``job``; None where no answer comes, whatever
    the reason: it is to be called here, then. Raises the UsageError that it raises.

    It may take as long as it would here, and no longer than whoever is to answer goes on.
    """
    here, there = os.pipe()
    path, environment = tuple(sys.path), dict(os.environ)
    try:
        asked = ask_warm(ForkedCall(function, job, str(Path.cwd()), path, environment), there)
    finally:
        os.close(there)
    try:
        answer = _Answer(here).whole() if asked else None
    except TimeoutError as error:
        print(f"elastic_ft: {error}: what it was to check is checked here", file=sys.stderr)
        answer = None
    finally:
        os.close(here)
    if answer is None:
        return None
    found = pickle.loads(answer)  # of a process that was forked for this one
    if isinstance(found, UsageError):
        raise found
    return found


class _Answer:
    """What comes through the pipe ``told``."""

    def __init__(self, told: int) -> None:
        self._told, self._pid = told, 0
        self._since_s = time.monotonic()

    def whole(self) -> bytes | None:
        """What was sent, by its length: what the function has started may keep the pipe open for
        as long as it lives. None if it broke off. Raises TimeoutError: who was to send it is ended,
        as it stands still, or does not begin."""
        head = self._read(2 * LENGTH.size, LENGTH.size)
        if len(head) < 2 * LENGTH.size:
            return None
        size = LENGTH.unpack(head[LENGTH.size :])[0]
        content = self._read(size)
        return content if len(content) == size else None

    def _read(self, size: int, pid_at: int = 0) -> bytes:
        """Less than ``size`` where it broke off."""
        content, stopped = b"", 0
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        while len(content) < size:
            if poll.poll(LOOK_S * 1000):
                if not (more := os.read(self._told, min(size - len(content), PIECE_BYTES))):
                    break
                content += more
                if not self._pid and len(content) >= pid_at > 0:
                    self._pid = LENGTH.unpack(content[:pid_at])[0]
                continue
            stopped = stopped + 1 if is_stopped(self._pid or warm_pid()) else 0
            if stopped == STOPPED_LOOKS:
                self._give_up("stands still")
            if not self._pid and time.monotonic() - self._since_s > FORK_S:
                self._give_up(f"has not begun after {FORK_S:g} s")
        return content

    def _give_up(self, why: str) -> NoReturn:
        pid = self._pid or warm_pid()
        if not self._pid:
            stop_warm()  # who asks for the next thing starts another one
        elif is_stopped(self._pid):
            os.kill(self._pid, signal.SIGKILL)
        raise TimeoutError(f"process {pid}, forked or to be forked from for this, {why}")


def answer_call(call: Order | ForkedCall, handle: int) -> None:
    """In the forked process: ends it, without an answer where there is none to give. Returns from
    what is no call."""
    if not isinstance(call, ForkedCall):
        return
    try:
        os.write(handle, LENGTH.pack(os.getpid()))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(call.folder)
        sys.path[:] = call.path
        os.environ.clear()
        os.environ.update(call.environment)
        draw_apart()
        module, _, name = call.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        try:
            found = function(call.job)
        except UsageError as error:
            found = error
        with os.fdopen(handle, "wb") as told:
            content = pickle.dumps(found)
            told.write(LENGTH.pack(len(content)) + content)
    finally:  # who has asked meets the same exception, and shows it
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        for child in multiprocessing.active_children():  # a manager of the model's, say
            child.terminate()
        os._exit(0)
