"""Plain variables of a script, as state of the job: a counter, the best value so far, patience."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from elastic_ft.errors import ConfigError


class Variable:
    """A local variable of a function that runs, or a module's.

    Args:
        frame: of the code that has it.
    """

    may_differ = False

    def __init__(self, frame: FrameType, name: str) -> None:
        """Raises ConfigError where there is none yet."""
        self.name, self._where = name, frame.f_code.co_name
        self.frame = frame if name in frame.f_locals and not _is_module(frame) else None
        self._globals = frame.f_globals
        if name not in self._values:
            raise ConfigError(
                f"ctx.prepare: {name!r} is no variable of {self._where}, nor of its module, yet: "
                "give it its first value before"
            )

    @property
    def _values(self) -> dict[str, Any]:
        return self._globals if self.frame is None else self.frame.f_locals

    def check_runs(self, running: Iterable[FrameType]) -> None:
        """Raises ConfigError where its function has returned."""
        if self.frame is not None and all(self.frame is not frame for frame in running):
            raise ConfigError(
                f"ctx.prepare: {self.name!r} was a variable of {self._where}, which has returned: "
                "give it in the function that goes over the loader"
            )

    def state_dict(self) -> dict[str, Any]:
        if self.name not in (values := self._values):
            raise ConfigError(f"ctx.prepare: {self.name!r} of {self._where} has no value any more")
        return {"value": values[self.name]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values[self.name] = state["value"]
        if self.frame is not None and sys.version_info < (3, 13):  # where that was a copy
            to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
            to_fast(ctypes.py_object(self.frame), ctypes.c_int(0))


def _is_module(frame: FrameType) -> bool:
    return frame.f_locals is frame.f_globals


def running_frames() -> list[FrameType]:
    """Of this thread, the innermost first."""
    found, frame = list[FrameType](), sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found
