"""Files that only grow, line by line: together where they come together, and by one owner alone."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_ft.errors import Superseded
from elastic_ft.observe import files


class AppendedFiles(ABC):
    """``flush`` is for any thread. Attributes:
    path: the folder.
    """

    path: Path

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}
        self._unwritten: dict[str, list[str]] = {}  # lines, by file
        self._is_patient = False
        self._lock = threading.Lock()

    @abstractmethod
    def check_owner(self) -> None:
        """Raises Superseded if the files are another's."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is appended meanwhile is written at its end, or by ``flush``, in one go."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False
            self.flush()

    def flush(self) -> None:
        """What was appended is in the files. Raises Superseded, and then it is not."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if not self._unwritten:
            return
        try:
            self.check_owner()
        except Superseded:
            self._unwritten = {}
            raise
        refused: list[OSError] = []
        for name in list(self._unwritten):
            if name == "steps.jsonl" and "ledger.jsonl" in self._unwritten:
                continue  # a step line has its samples
            try:
                self._write_out(name)
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def _write_out(self, name: str) -> None:
        """What a full disk does not take, be it half a line, is written the next time.

        Raises FileNotFoundError where the file was removed: what is there by now, under its name,
        is another job's.
        """
        file = self._files.get(name)
        if file is not None and not os.fstat(file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(self.path / name))
        if file is None:
            file = self._files[name] = files.open_to_append(self.path / name)
        rest = "".join(self._unwritten.pop(name)).encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        finally:
            if rest:
                self._unwritten[name] = [rest.decode()]

    def was_removed(self, error: OSError) -> bool:
        """Whether that is what ``error`` says, of these files and no others."""
        where = Path(str(error.filename)).parent
        return error.errno == errno.ENOENT and where == self.path

    def _append(self, name: str, line: dict[str, Any]) -> int:
        """Returns the bytes to be written."""
        written = files.line_of(line)
        self._unwritten.setdefault(name, []).append(written)
        if not self._is_patient:
            self._flush()
        return len(written)

    def _close_file(self, name: str) -> None:
        self._flush()
        file = self._files.pop(name, None)
        if file is not None:
            file.close()
