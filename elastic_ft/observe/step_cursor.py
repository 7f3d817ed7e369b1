"""What all writers of committed steps to other tools have: one for a folder, and how far it is."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.observe import files
from elastic_ft.observe.lines import Line

CURSOR, LOCK = "cursor.json", "writer.lock"
LEFT_OUT = ("step", "samples")  # the axis, and what it is a multiple of


@dataclass(frozen=True, slots=True)
class Cursor:
    """What was written last: a step, and the generation that computed it.

    Attributes:
        writers: that there were; files of one second are told apart by it.
        run: the other tool's name of what is written to; "" if it has none.
    """

    step: int = 0
    generation: int = 0
    writers: int = 0
    run: str = ""

    def knows(self, line: Line) -> bool:
        """Of steps.jsonl. A step that was made again is of a later generation."""
        return bool(line["step"] <= self.step and line["generation"] <= self.generation)

    def save(self, folder: Path) -> None:
        files.replace(folder / CURSOR, json.dumps(asdict(self)).encode())


def read_cursor(folder: Path) -> Cursor:
    """Raises ConfigError."""
    path = folder / CURSOR
    try:
        return Cursor(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Cursor()
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path} is no cursor: delete the folder, and all is written anew"
        ) from None


def numbers_of(line: Line) -> Iterable[tuple[str, float]]:
    """What can be drawn of a step; the script's own are under ``logged/`` and ``metrics/``."""
    own = {
        f"{kind}/{name}": value
        for kind in ("logged", "metrics")
        for name, value in (line.get(kind) or {}).items()
    }
    for name, value in ({n: v for n, v in line.items() if n not in LEFT_OUT} | own).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def lock_folder(folder: Path, tool: str) -> TextIO:
    """Makes the folder; held until the file is closed. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise UsageError(f"{tool}: {folder}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"{tool}: another process writes to {folder}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
