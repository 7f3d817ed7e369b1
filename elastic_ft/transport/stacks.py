"""Where a process stands, as it can say itself.

A worker's control thread still runs while its training thread hangs, and tells its stack. Of a
process that says nothing any more, its node's keeper tells: ``keeper.processes``.
"""

from __future__ import annotations

import sys
import sysconfig
from types import FrameType

FRAMES_MAX = 40
OURS = tuple(f"elastic_ft/{name}/" for name in ("engines", "groups", "state", "worker"))
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
    stdlib = sysconfig.get_paths()["stdlib"] + "/"
    for mark in ("site-packages/", "dist-packages/", stdlib, "elastic_ft/"):
        _, found, tail = filename.rpartition(mark)
        if found:
            filename = f"elastic_ft/{tail}" if mark == "elastic_ft/" else tail
            break
    return f"{filename}:{line} {function}"


def collective_in(frames: tuple[str, ...]) -> str:
    """The outermost of torch's collectives that the stack is in, or an empty string."""
    inside = ""
    for frame in frames:  # innermost first
        if any(folder in frame for folder in OURS):
            break
        function = frame.rpartition(" ")[2]
        if function.endswith("wrapper"):  # decorators that all of them have
            continue
        if any(mark in frame for mark in COLLECTIVES):
            inside = function
        elif "torch/autograd/graph.py" in frame:
            inside = inside or "backward"
    return inside


def own_code_in(frames: tuple[str, ...]) -> str:
    """The innermost frame of the job's own code: no library's and not ours; or an empty string."""
    own = (f for f in frames if f.startswith("/") and "/torchinductor_" not in f)
    return next(own, "")


# --------------------------------------------------------------------- by the keeper of a node
