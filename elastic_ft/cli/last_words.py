"""What ended this process, where the user's code took it along: a line for who waits for an answer.

Python says nothing then, and a shell as much as "Killed". So a small process that was forked before
looks on: it reads what ``faulthandler`` writes of a fatal signal, and sees its parent go.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from elastic_ft.transport.stacks import frame_line, own_code_in

LOOK_S = 0.5
BYTES_MAX = 1 << 16  # of what is said in the end
SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
QUIET = {signal.SIGINT, signal.SIGTERM}  # not for who looks on


@contextlib.contextmanager
def witnessed(doing: str) -> Iterator[None]:
    """Should this process end meanwhile, by a signal or ``os._exit``, stderr is told of what.

    Args:
        doing: in words, before what happened.
    """
    told, own = os.pipe()
    kills, parent = _kills_for_memory(), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which who looks on does not need
            witness = os.fork()
        if witness == 0:
            _look_on(told, own, parent, doing, kills)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(told)
    if is_ours := not faulthandler.is_enabled():  # else somebody has it write elsewhere
        faulthandler.enable(own, all_threads=False)
    try:
        yield
    finally:
        if is_ours:
            faulthandler.disable()
        os.kill(witness, signal.SIGKILL)
        os.waitpid(witness, 0)
        os.close(own)


def _look_on(told: int, own: int, parent: int, doing: str, kills: int) -> NoReturn:
    """That the parent is gone counts, too: who the user's code has started may keep the pipe."""
    try:
        os.close(own)
        text, poll = b"", select.poll()
        poll.register(told, select.POLLIN)
        is_over = False
        while not is_over:
            is_over = os.getppid() != parent  # before the pipe is read for the last time
            while poll.poll(0 if is_over else LOOK_S * 1000):
                if not (more := os.read(told, BYTES_MAX)):
                    is_over = True
                    break
                text = (text + more)[:BYTES_MAX]
        why = why_ended(text.decode(errors="replace"), _kills_for_memory() - kills)
        os.write(2, f"elastic-ft: {doing}: this process was ended {why}\n".encode())
    finally:
        os._exit(0)


def why_ended(text: str, kills: int) -> str:
    """``text``: faulthandler's; ``kills``: by the kernel, for want of memory, meanwhile."""
    if found := re.match(r"Fatal Python error: ([^\n]*)", text):
        what = found[1].strip()
        frames = tuple(
            frame_line(file, int(line), name) for file, line, name in FRAME.findall(text)
        )
        where = own_code_in(frames) or next(iter(frames), "")
        return f"by {SIGNALS.get(what, what)} ({what.lower()})" + f" in {where}" * bool(where)
    if kills > 0:
        return "by SIGKILL: memory ran out"
    return "from outside (SIGKILL), or by os._exit"


def _kills_for_memory() -> int:
    """By this machine's kernel since it started; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0
