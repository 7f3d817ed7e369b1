"""A run folder, read from outside while the run goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ft.errors import StoreFailed
from elastic_ft.observe.lines import SEGMENTS, Line, parse_lines

if TYPE_CHECKING:
    from elastic_ft.storage.store import Store

REMOTE_EVERY_S = 2.0  # a remote folder is a mirror, some seconds behind
REMOTE_WITHIN_S = 15.0  # each of a look's calls; the next look sees more


def local_path(url: str) -> Path | None:
    """The folder of a path or file:// URL, None for any other URL."""
    if "://" in url and not url.startswith("file://"):
        return None
    return Path(url.removeprefix("file://")).absolute()


class Tail:
    """The complete lines of a .jsonl file that are new since the last look.

    A file that was replaced (RunFolder.truncate does so, at a start and at a roll back) is read
    from its beginning, so lines may come again. The file need not exist yet.
    Of a remote folder, closed segments (``observe.segments``) are downloaded once.
    """

    def __init__(self, url: str, name: str) -> None:
        folder = local_path(url)
        if folder is not None and (folder / SEGMENTS / name).is_dir():
            folder = None  # a copy of a remote folder is read as that is
        self._path = folder / name if folder is not None else None
        self._folder_url, self._name = url.rstrip("/"), name
        self._url = f"{self._folder_url}/{name}"
        self._inode, self._offset, self._next_look_s = 0, 0, 0.0
        self._store: Store | None = None
        self._read_segments: dict[str, int] = {}  # key -> bytes: they are not downloaded again

    def read(self) -> list[Line]:
        content = self._local() if self._path is not None else self._remote()
        self._offset += content.rfind(b"\n") + 1
        return parse_lines(content, self._url)

    def _local(self) -> bytes:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return b""

    def _remote(self) -> bytes:
        if time.monotonic() < self._next_look_s:
            return b""
        self._next_look_s = time.monotonic() + REMOTE_EVERY_S
        from elastic_ft.observe import segments
        from elastic_ft.storage.store import open_store

        if self._store is None:
            self._store = open_store(self._folder_url, deadline_s=REMOTE_WITHIN_S)
        try:
            found = segments.read(self._store, self._name, self._read_segments)
            content = found.beyond(self._offset)
            if content is None:
                self._offset = 0
                found = segments.read(self._store, self._name)
                content = found.beyond(0)
        except StoreFailed:  # not there yet, or the store is away: the next look sees more
            return b""
        assert content is not None
        self._read_segments = found.sizes
        return content


class Watch:
    """What a run does, from its folder alone. Lines of earlier runs in the folder are left out.

    Attributes:
        formed: the last ``generation_formed`` line of this run; {} before the first.
        step: the last committed step of this run; -1 before the first generation.
        last: its line in steps.jsonl, {} if none was committed yet.
    """

    def __init__(self, url: str) -> None:
        self._events, self._steps = Tail(url, "events.jsonl"), Tail(url, "steps.jsonl")
        self._events.read()
        self.formed: Line = {}
        self.step = -1
        self.last: Line = {}
        self._first_generation = 0

    def poll(self) -> tuple[list[Line], list[Line]]:
        """Returns the journal lines and the committed steps that are new."""
        events = self._events.read()
        for line in events:
            if line["event"] == "generation_formed":
                self._first_generation = self._first_generation or line["generation"]
                self.formed = line
                self.step = max(self.step, line["step"])
            elif line["event"] == "rolled_back":
                self.step = min(self.step, line["step"])
        steps = []
        for line in self._steps.read() if self._first_generation else []:
            if line["generation"] >= self._first_generation and line["step"] > self.step:
                self.step, self.last = line["step"], line
                steps.append(line)
        return events, steps

    def member(self, rank: int) -> Line | None:
        """Who has ``rank`` in the newest generation: worker, pid, node, raylet_pid."""
        return next((m for m in self.formed.get("members", ()) if m["rank"] == rank), None)
