"""A run folder, read from outside: at any time, local or remote, while the run goes on.

What is heavy (numpy, by way of the store) is imported for remote folders alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ft.config import Job, parse_text
from elastic_ft.core.invariants import Expected, Violation, check_run
from elastic_ft.errors import ConfigError, ElasticError, StoreFailed, one_line
from elastic_ft.observe.lines import SEGMENTS, Line, local_path, parse_lines

if TYPE_CHECKING:
    from elastic_ft.observe.segments import Found
    from elastic_ft.storage.store import Store

READ_DEADLINE_S = 10.0  # a store that is away is waited for by others
REMOTE_EVERY_S = 2.0  # a remote folder is a mirror, some seconds behind
WHY_MAX = 400  # it may name the file once more
REMOTE_WITHIN_S = 15.0  # each of a look's calls; the next look sees more


class RunReader:
    """The files of a run, by the path or URL that was its ``--out``; each as it is at the call."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url).rstrip("/") or "/"

    @cached_property
    def _folder(self) -> Path | None:
        """If it is on a disk of this machine; asked once, for a run may be looked at for days."""
        return local_path(self.url)

    def job(self) -> Job:
        """Raises ConfigError where this is no run folder, or the job is not valid."""
        return parse_text(self.content("job.yaml"), f"{self.url}/job.yaml")

    def events(self) -> list[Line]:
        """The complete lines, of this and the next three; none without the file. A torn last line
        is left out. Raises ConfigError where a line is none that a run writes."""
        return self._lines("events.jsonl")

    def steps(self) -> list[Line]:
        return self._lines("steps.jsonl")

    def inbox(self) -> list[Line]:
        return self._lines("inbox.jsonl")

    def ledger(self) -> list[Line] | None:
        """None without ``audit``."""
        return self._lines("ledger.jsonl") if self._find("ledger.jsonl") is not None else None

    def result(self) -> dict[str, Any]:
        """What is in result.json; {} if there is none, or it can't be read."""
        with contextlib.suppress(StoreFailed):
            return self.known_result()
        return {}

    def known_result(self) -> dict[str, Any]:
        """As ``result``. Raises StoreFailed where it can't be said whether there is one."""
        try:
            content = self._find("result.json")
        except ConfigError as error:
            raise StoreFailed(str(error)) from None
        try:
            found = json.loads(content or b"{}")
        except (ValueError, RecursionError):  # who writes there says what it is
            return {}
        return found if isinstance(found, dict) else {}

    def tail(self, name: str) -> Tail:
        return Tail(self.url, name)

    def follow(self) -> Watch:
        return Watch(self.url)

    def join(self) -> Watch:
        """As ``follow``, of a run that is under way: from its newest generation on."""
        return Watch(self.url, under_way=True)

    def violations(self, expected: Expected) -> list[Violation]:
        """What contradicts I1 to I8 in a finished run (``core.invariants``)."""
        result = self.result() or None
        return check_run(self.events(), self.steps(), self.ledger(), result, expected)

    def content(self, name: str) -> bytes:
        """Raises ConfigError where there is no such file."""
        found = self._find(name)
        if found is None:
            raise ConfigError(f"{self.url}: not a run folder: no {name}")
        return found

    def _lines(self, name: str) -> list[Line]:
        return parse_lines(self._find(name) or b"", f"{self.url}/{name}", name)

    def _find(self, name: str) -> bytes | None:
        """A file, its segments included; None if there is none. Raises ConfigError where that
        can't be said."""
        try:
            return _read(self.url, self._folder, name)
        except ElasticError as error:  # which says what, and where
            raise ConfigError(str(error)) from None
        except OSError as error:
            why = one_line(error, WHY_MAX)
            raise ConfigError(f"{self.url}/{name} can't be read: {why}") from None


def _read(url: str, folder: Path | None, name: str) -> bytes | None:
    """Raises OSError, ElasticError."""
    if folder is not None and not (folder / SEGMENTS / name).is_dir():
        return _read_file(folder / name)
    from elastic_ft.observe.segments import read_whole
    from elastic_ft.storage.store import if_there, open_store

    store = open_store(url, deadline_s=READ_DEADLINE_S)
    return if_there(lambda: read_whole(store, name))


def _read_file(path: Path) -> bytes | None:
    """Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def read_lines(path: Path) -> list[Line]:
    """The complete lines of a .jsonl file; none without it. Raises ConfigError, OSError."""
    return parse_lines(_read_file(path) or b"", str(path), path.name)


def last_generation(path: Path) -> int:
    """The newest generation that a journal knows of."""
    return max((line["generation"] for line in read_lines(path)), default=0)


class Tail:
    """The complete lines of a .jsonl file that are new since the last look.

    A file that was replaced (RunFolder.truncate does so, at a start and at a roll back) is read
    from its beginning, so lines may come again. The file need not exist yet.
    Of a remote folder each byte is downloaded once: a look begins with the last line that is known,
    and goes on from there if it is still in its place.
    """

    def __init__(self, url: str, name: str) -> None:
        folder = local_path(url)
        self._path = folder / name if folder is not None else None
        self._folder_url, self._name = url.rstrip("/"), name
        self._url = f"{self._folder_url}/{name}"
        self._inode, self._offset, self._next_look_s = 0, 0, 0.0
        self._store: Store | None = None
        self._found: Found | None = None  # its segments are not downloaded again
        self._last = b""  # of its lines, that which was read last

    def read(self, bytes_max: int = -1, whole: bool = False) -> list[Line]:
        """``bytes_max``: about so much of a local file, in whole lines; the next look goes on.
        ``whole``: there is no next look: all that is there now, of a remote file, too. Raises
        StoreFailed where that can't be read."""
        if self._path is not None and (self._path.parent / SEGMENTS / self._name).is_dir():
            self._path = None  # a copy, or the server's side, of a remote folder: read as that is
        content = self._local(bytes_max) if self._path is not None else self._remote(whole)
        end = content.rfind(b"\n") + 1
        self._offset += end
        if end and self._path is None:
            self._last = content[content.rfind(b"\n", 0, end - 1) + 1 : end]
        return parse_lines(content[:end], self._url)

    def _local(self, bytes_max: int) -> bytes:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                return file.read(bytes_max) + (file.readline() if bytes_max >= 0 else b"")
        except FileNotFoundError:
            return b""

    def _remote(self, whole: bool) -> bytes:
        if time.monotonic() < self._next_look_s and not whole:
            return b""
        self._next_look_s = time.monotonic() + REMOTE_EVERY_S
        from elastic_ft.observe import segments
        from elastic_ft.storage.kinds import FailureKind
        from elastic_ft.storage.store import StoreError, open_store

        if self._store is None:
            self._store = open_store(self._folder_url, deadline_s=REMOTE_WITHIN_S)
        try:
            if (content := self._appended()) is not None:
                return content
            found = segments.read_segments(self._store, self._name, self._found)
            content = None if self._is_replaced(found) else found.beyond(self._offset)
            if content is None:
                self._offset, self._last = 0, b""
                found = segments.read_segments(self._store, self._name)
                content = found.beyond(0)
        except StoreError as error:  # not there yet, or the store is away: the next look sees more
            if whole and error.kind is not FailureKind.MISSING:
                raise
            return b""
        assert content is not None
        self._found = replace(found, tail=found.head, bodies={})
        return content

    def _appended(self) -> bytes | None:
        """What comes after the last line, if that is where it was. None where that can't be told.
        Raises StoreError where the store is away."""
        from elastic_ft.storage.kinds import FailureKind
        from elastic_ft.storage.store import StoreError

        if not self._last or self._found is None:
            return None
        assert self._store is not None
        begin = self._offset - sum(self._found.sizes.values()) - len(self._last)
        try:
            content = self._store.get(self._name, begin)
        except StoreError as error:
            if error.kind in (FailureKind.UNREACHABLE, FailureKind.BUSY, FailureKind.MISSING):
                raise
            return None  # it is shorter
        is_there = content.startswith(self._last)
        return content[len(self._last) :] if is_there else None

    def _is_replaced(self, found: Found) -> bool:
        """By a file that has grown beyond what was read of the one before it."""
        begin = self._offset - sum(found.sizes.values()) - len(self._last)
        return begin >= 0 and not found.tail.startswith(self._last, begin)


class NewEvents:
    """The journal's lines that are new since the last look, each once: a controller that goes on
    where another one was replaces the file (``Tail``)."""

    def __init__(self, url: str) -> None:
        self._tail = Tail(url, "events.jsonl")
        self._told: dict[int, object] = {}  # at_s by seq

    def read(self, whole: bool = False) -> list[Line]:
        """As ``Tail.read``."""
        new = []
        for line in self._tail.read(whole=whole):
            number, at_s = line.get("seq"), line.get("at_s")
            if isinstance(number, int):
                if self._told.get(number) == at_s:
                    continue
                self._told[number] = at_s
            new.append(line)
        return new


class Watch:
    """What a run does, from its folder alone. Lines of earlier runs in the folder are left out.

    Attributes:
        earlier: the journal lines that were there.
        formed: the last ``generation_formed`` line of this run; {} before the first.
        step: the last committed step of this run; -1 before the first generation.
        last: its line in steps.jsonl, {} if none was committed yet.
    """

    def __init__(self, url: str, under_way: bool = False) -> None:
        self._events, self._steps = NewEvents(url), Tail(url, "steps.jsonl")
        self.earlier = self._events.read()
        self.formed: Line = {}
        self.step = -1
        self.last: Line = {}
        self._first_generation = 0
        formed = [line for line in self.earlier if line["event"] == "generation_formed"]
        if under_way and formed:
            self.formed, self.step = formed[-1], formed[-1]["step"]
            self._first_generation = self.formed["generation"]

    def poll(self, whole: bool = False) -> tuple[list[Line], list[Line]]:
        """Returns the journal lines and the committed steps that are new. ``whole``: as of
        ``Tail.read``."""
        events = self._events.read(whole=whole)
        for line in events:
            if line["event"] == "generation_formed":
                self._first_generation = self._first_generation or line["generation"]
                self.formed = line
                self.step = max(self.step, line["step"])
            elif line["event"] == "rolled_back":
                self.step = min(self.step, line["step"])
        steps = []
        for line in self._steps.read(whole=whole) if self._first_generation else []:
            if line["generation"] >= self._first_generation and line["step"] > self.step:
                self.step, self.last = line["step"], line
                steps.append(line)
        return events, steps

    def member(self, rank: int) -> Line | None:
        """Who has ``rank`` in the newest generation: worker, pid, node, raylet_pid."""
        return next((m for m in self.formed.get("members", ()) if m["rank"] == rank), None)
