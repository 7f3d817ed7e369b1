"""What a node's keeper can see of a process that says nothing any more.

Stopped, in the kernel, or holding the interpreter lock: the kernel knows its state, and py-spy its
Python stack where that is allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from elastic_ft.core.assignment import WorkerId
from elastic_ft.transport.control import Stood
from elastic_ft.transport.lifeline import Lifeline
from elastic_ft.transport.stacks import FRAMES_MAX, frame_line

KERNEL_FRAMES_MAX = 6
SPY_TIMEOUT_S = 5.0  # the controller waits for less: what comes later is still in the journal


def inspect(controller: Lifeline, worker: WorkerId, pid: int) -> None:
    """Tells the controller what can be seen of a process of this node, in a thread of its own."""

    def look() -> None:
        process = process_facts(pid)
        controller.send(Stood(worker, "keeper", process=process))
        frames = spy(pid)
        controller.send(Stood(worker, "keeper", frames=frames, process=process, last=True))

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
