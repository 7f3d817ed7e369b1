"""Where a process stands: what it can say itself, and what its node can say of it.

A worker's control thread still runs while its training thread hangs, and tells its stack. Of a
process that says nothing any more (stopped, in the kernel, holding the interpreter lock), the
keeper of its node reads what the kernel knows, and its Python stack with py-spy if that may.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_ft.core.events import WorkerId
from elastic_ft.runtime.control import Stood
from elastic_ft.runtime.wire import Channel

FRAMES_MAX = 40
KERNEL_FRAMES_MAX = 6
SPY_TIMEOUT_S = 5.0  # the controller waits for less: what comes later is still in the journal
OURS = "elastic_ft/runtime/"
COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/distributed.py")


def stack_of(thread: int) -> tuple[str, ...]:
    """The frames of one of this process's threads, innermost first."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames: list[str] = []
    while frame is not None and len(frames) < FRAMES_MAX:
        code = frame.f_code
        frames.append(frame_line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def frame_line(filename: str, line: int, function: str) -> str:
    """``torch/nn/modules/module.py:1562 _call_impl``: without where it is installed."""
    for mark in ("site-packages/", sysconfig.get_paths()["stdlib"] + "/", "elastic_ft/"):
        _, found, tail = filename.rpartition(mark)
        if found:
            filename = f"elastic_ft/{tail}" if mark == "elastic_ft/" else tail
            break
    return f"{filename}:{line} {function}"


def collective_in(frames: tuple[str, ...]) -> str:
    """The outermost of torch's collectives that the stack is in, or an empty string."""
    inside = ""
    for frame in frames:  # innermost first
        if OURS in frame:
            break
        function = frame.rpartition(" ")[2]
        if function.endswith("wrapper"):  # decorators that all of them have
            continue
        if any(mark in frame for mark in COLLECTIVES):
            inside = function
        elif "torch/autograd/graph.py" in frame:
            inside = inside or "backward"
    return inside


# --------------------------------------------------------------------- by the keeper of a node


def inspect(channel: Channel, worker: WorkerId, pid: int) -> None:
    """Tells the controller what can be seen of a process of this node, in a thread of its own."""

    def look() -> None:
        process = process_facts(pid)
        channel.send(Stood(worker, "keeper", process=process))
        frames = spy(pid)
        channel.send(Stood(worker, "keeper", frames=frames, process=process, last=True))

    threading.Thread(target=look, name="inspect", daemon=True).start()


def process_facts(pid: int) -> dict[str, Any]:
    """State, where in the kernel, memory; {} if there is no such process."""
    root = Path("/proc") / str(pid)
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in (root / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("State", "VmRSS", "Threads"):
                facts[name] = value.strip()
    with contextlib.suppress(OSError):
        facts["wchan"] = (root / "wchan").read_text().strip("\0\n") or "0"
    with contextlib.suppress(OSError):  # root alone may
        kernel = (root / "stack").read_text().splitlines()[:KERNEL_FRAMES_MAX]
        facts["kernel"] = [line.rpartition("] ")[2] for line in kernel]
    return facts


def spy(pid: int) -> tuple[str, ...]:
    """The Python stack of another process's training thread; () if it can't be had."""
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not os.access(program, os.X_OK):
        return ()
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SPY_TIMEOUT_S, check=True)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):  # not allowed, or it is gone
        return ()
    stacks = [
        tuple(frame_line(f["filename"], f["line"], f["name"]) for f in thread["frames"])
        for thread in threads
    ]
    training = (stack for stack in stacks if any(" run_worker" in frame for frame in stack))
    return next(training, stacks[0] if stacks else ())[:FRAMES_MAX]
