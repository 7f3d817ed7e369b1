"""Where user code raised: the frames that its author knows, few enough for one journal line; and
what those frames keep.
"""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
import traceback
from pathlib import Path

from elastic_ft.errors import redacted

FRAMES_MAX, LINE_MAX = 6, 160
OURS = str(Path(__file__).resolve().parents[1])
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")})


def user_frames(error: BaseException) -> tuple[str, ...]:
    """The innermost frames of the user's own files, the last one where it raised.

    If there are none (it passed something odd to a library, say), those of anybody's files.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    if error.__cause__ is not None:
        frames += traceback.walk_tb(error.__cause__.__traceback__)
    told = traceback.StackSummary.extract(iter(frames))
    theirs = [frame for frame in told if not frame.filename.startswith((OURS, *LIBRARIES))]
    return tuple(_line(frame) for frame in (theirs or told)[-FRAMES_MAX:])


def forget_frames(error: BaseException | None) -> None:
    """Lets go of what was being computed where ``error`` was raised: a step's activations, and what
    was gathered for it. An error that is in a frame of its own keeps them until a collection."""
    seen: list[BaseException] = []  # two that are each other's cause would go round for ever
    while error is not None and all(error is not one for one in seen):
        seen.append(error)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_code.co_flags & GENERATORS:  # one that goes on would end
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__


def _line(frame: traceback.FrameSummary) -> str:
    text = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return redacted(f"{text}: {frame.line}" if frame.line else text)[:LINE_MAX]
