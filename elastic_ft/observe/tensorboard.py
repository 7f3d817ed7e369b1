"""A run's committed steps as TensorBoard's event files: each step once, whatever happened.

One writer, outside the run, reads steps.jsonl as anybody can; what kills workers and controllers
does not reach it. A cursor beside the event files says how far it has come. Who goes on after it
was killed, or after the run went back to an earlier step, has TensorBoard forget what came later
(``purge_step``), and tells it again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.observe.lines import Line

CURSOR, LOCK = "cursor.json", "writer.lock"
LEFT_OUT = ("step", "samples")  # the axis, and what it is a multiple of


@dataclass(frozen=True, slots=True)
class Cursor:
    """What was written last: a step, and the generation that computed it."""

    step: int = 0
    generation: int = 0
    writers: int = 0  # that there were; files of one second are told apart by it


class TensorBoardLog:
    """Raises UsageError without tensorboardX, or where another one writes to ``folder``."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise UsageError("tensorboard: needs tensorboardX: pip install tensorboardX") from None
        self._make_writer: Any = tensorboardX.SummaryWriter
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lock = folder, _locked(folder / LOCK)
        self.cursor = _read(folder / CURSOR)
        self._writer: Any = None

    def write(self, lines: Iterable[Line]) -> int:
        """Of steps.jsonl, in their order; returns how many were new. They are on disk then."""
        count = 0
        for line in lines:
            step, generation = line["step"], line["generation"]
            if step <= self.cursor.step and generation <= self.cursor.generation:
                continue  # read again
            if self._writer is None or step <= self.cursor.step:
                self._begin(step)
            for name, value in _numbers(line):
                self._writer.add_scalar(name, value, step, walltime=line.get("applied_at_s"))
            self.cursor = Cursor(step, generation, self.cursor.writers)
            count += 1
        if count:
            self._writer.flush()
            self._save()
        return count

    def _begin(self, step: int) -> None:
        """A file that begins with ``step``, and makes void what others have from there on."""
        if self._writer is not None:
            self._writer.close()
        number = self.cursor.writers + 1
        self.cursor = Cursor(min(self.cursor.step, step - 1), self.cursor.generation, number)
        self._save()
        self._writer = self._make_writer(
            str(self._folder), purge_step=step, filename_suffix=f".{number:06}"
        )

    def _save(self) -> None:
        path = self._folder / CURSOR
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(asdict(self.cursor)))
        beside.replace(path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._lock.close()


def _numbers(line: Line) -> Iterable[tuple[str, float]]:
    """What can be drawn of a step; the script's own are under ``logged/`` and ``metrics/``."""
    own = {
        f"{kind}/{name}": value
        for kind in ("logged", "metrics")
        for name, value in (line.get(kind) or {}).items()
    }
    for name, value in ({n: v for n, v in line.items() if n not in LEFT_OUT} | own).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def _locked(path: Path) -> TextIO:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"tensorboard: another process writes to {path.parent}") from None
    file.write(str(os.getpid()))
    file.flush()
    return file


def _read(path: Path) -> Cursor:
    try:
        return Cursor(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Cursor()
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path} is no cursor: delete the folder, and all is written anew"
        ) from None
