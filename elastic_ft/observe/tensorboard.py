"""A run's committed steps as TensorBoard's event files: each step once, whatever happened.

One writer, outside the run, reads steps.jsonl as anybody can; what kills workers and controllers
does not reach it. A cursor beside the event files says how far it has come. Who goes on after it
was killed, or after the run went back to an earlier step, has TensorBoard forget what came later
(``purge_step``), and tells it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_ft.errors import UsageError
from elastic_ft.observe.lines import Line
from elastic_ft.observe.step_cursor import lock_folder, numbers_of, read_cursor


class TensorBoardLog:
    """Raises UsageError without tensorboardX, or where another one writes to ``folder``."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise UsageError("tensorboard: needs tensorboardX: pip install tensorboardX") from None
        self._make_writer: Any = tensorboardX.SummaryWriter
        self._folder, self._lock = folder, lock_folder(folder, "tensorboard")
        self.cursor = read_cursor(folder)
        self._writer: Any = None

    def write(self, lines: Iterable[Line]) -> int:
        """Of steps.jsonl, in their order; returns how many were new. They are on disk then."""
        count = 0
        for line in lines:
            step, generation = line["step"], line["generation"]
            if self.cursor.knows(line):
                continue  # read again
            if self._writer is None or step <= self.cursor.step:
                self._begin(step)
            for name, value in numbers_of(line):
                self._writer.add_scalar(name, value, step, walltime=line.get("applied_at_s"))
            self.cursor = replace(self.cursor, step=step, generation=generation)
            count += 1
        if count:
            self._writer.flush()
            self.cursor.save(self._folder)
        return count

    def _begin(self, step: int) -> None:
        """A file that begins with ``step``, and makes void what others have from there on."""
        if self._writer is not None:
            self._writer.close()
        number = self.cursor.writers + 1
        self.cursor = replace(self.cursor, step=min(self.cursor.step, step - 1), writers=number)
        self.cursor.save(self._folder)
        self._writer = self._make_writer(
            str(self._folder), purge_step=step, filename_suffix=f".{number:06}"
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._lock.close()
