"""A function of what lies above this, called in a process that is forked from the warm one.

So who asks need not import torch for its answer: the warm process does that in any case.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from elastic_ft.config import Job
from elastic_ft.errors import UsageError
from elastic_ft.hosts.local.orders import ForkedCall, Order
from elastic_ft.hosts.local.warm import ask_warm
from elastic_ft.worker.forked import draw_apart

LENGTH = struct.Struct("<Q")  # of an answer, before it


def call_forked(function: str, job: Job) -> Any:
    """What ``function``, "module:name", returns of ``job``; None where no answer comes, whatever
    the reason: it is to be called here, then. Raises the UsageError that it raises."""
    here, there = os.pipe()
    path, environment = tuple(sys.path), dict(os.environ)
    try:
        asked = ask_warm(ForkedCall(function, job, str(Path.cwd()), path, environment), there)
    finally:
        os.close(there)
    with os.fdopen(here, "rb") as told:
        answer = _whole(told) if asked else None
    if answer is None:
        return None
    found = pickle.loads(answer)  # of a process that was forked for this one
    if isinstance(found, UsageError):
        raise found
    return found


def _whole(told: BinaryIO) -> bytes | None:
    """What was sent, by its length: what the function has started may keep the pipe open for as
    long as it lives. None if it broke off."""
    length = told.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(length)
    content = told.read(size)
    return content if len(content) == size else None


def answer_call(call: Order | ForkedCall, handle: int) -> None:
    """In the forked process: ends it, without an answer where there is none to give. Returns from
    what is no call."""
    if not isinstance(call, ForkedCall):
        return
    try:
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
