"""The growing files of a remote run folder, in segments: object stores have no append.

Under the folder's URL::

    segments/<name>/<n>   a closed segment: whole lines, the first of them numbered n; uploaded once
    <name>                the tail: the whole lines after the closed segments

A folder whose files are smaller than a segment has tails alone.

A line's number (``NUMBERS``) is unique in its file and grows, so **the tail's first number says
which segments count: those that begin before it**, none where the tail is empty. This makes any
crash between two operations harmless:

- A segment is closed: first the segment is put, then the tail that goes on after it. Between the
  two, the old tail begins where the segment does, so the segment doesn't count yet.
- A record is cut back (a rollback): first the tail is put, which begins where a segment that stays
  ends, then the later segments are deleted. They begin where the tail does, or after it.

A store's list may lag behind what was put. Where lines are missing between two segments, the one
that would begin there is asked for by its key: a controller would go on from a story with a hole.
Where there is none, they are missing for good (of steps, they never were there).

Segments that don't count are deleted before another is closed: later tails begin after them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from elastic_ft.errors import MALFORMED
from elastic_ft.observe.lines import SEGMENTS
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store

SEGMENT_BYTES = 16 << 20  # at most, single longer lines aside
NUMBERS = {
    "events.jsonl": "seq",
    "inbox.jsonl": "line",
    "steps.jsonl": "step",
    "ledger.jsonl": "step",
}
FIRST = {"events.jsonl": 0, "inbox.jsonl": 0, "steps.jsonl": 1, "ledger.jsonl": 1}
READ_ATTEMPTS = 5  # of a file that is cut back at the same moment


@dataclass(frozen=True, slots=True)
class Found:
    """A file as it was at one moment.

    Attributes:
        sizes: of the closed segments that count, in order: key -> bytes.
        bodies: those that were not known before: key -> content.
        ignored: keys of segments that don't count.
    """

    tail: bytes
    sizes: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def head(self) -> bytes:
        """The tail's first line; empty without one."""
        return self.tail[: self.tail.find(b"\n") + 1]

    def whole(self) -> bytes:
        """Of one that was read with nothing known."""
        content = self.beyond(0)
        assert content is not None
        return content

    def beyond(self, offset: int) -> bytes | None:
        """The bytes from ``offset``; None if the file is shorter, or they were not read now."""
        if offset > sum(self.sizes.values()) + len(self.tail):
            return None
        parts, start = [], 0
        for key, size in self.sizes.items():
            if start + size > offset:
                if key not in self.bodies:
                    return None
                parts.append(self.bodies[key][max(0, offset - start) :])
            start += size
        return b"".join([*parts, self.tail[max(0, offset - start) :]])


def read_segments(store: Store, name: str, known: Found | None = None) -> Found:
    """A file of a folder; of segments that are ``known`` not the content. The store is asked for a
    list only where there may be others: the tail begins otherwise.

    Raises StoreError, of kind MISSING if there is no such file.
    """
    if name not in NUMBERS:
        return Found(store.get(name))
    for _ in range(READ_ATTEMPTS):
        # First the tail: segments that are closed from now on don't count with it.
        tail = store.get(name)
        if known is not None and (found := _unchanged(tail, known)) is not None:
            return found
        keys = listed(store, name)
        counting = [key for key in keys if _counts(key, name, tail)]
        sizes, bodies = {}, {}
        try:
            for key, body in _segments(store, name, counting, tail, known):
                if body is not None:
                    bodies[key] = body
                sizes[key] = known.sizes[key] if body is None and known else len(body or b"")
        except StoreError as error:
            if error.kind is FailureKind.MISSING:  # deleted: the tail is another one by now
                continue
            raise
        # Segments are deleted after the tail was put. If it begins as it did, none was.
        head = tail[: tail.find(b"\n") + 1]
        if not head or store.get(name, 0, len(head)) == head:
            ignored = tuple(key for key in keys if key not in sizes)
            return Found(tail, sizes, bodies, ignored)
    raise StoreError(f"{store.url_of(name)} changes while it is read", FailureKind.BUSY)


def _segments(
    store: Store, name: str, counting: list[str], tail: bytes, known: Found | None
) -> Iterator[tuple[str, bytes | None]]:
    """Those before the tail, in their order, also where the list lacks one; None for the content of
    one that is known. Raises StoreError."""
    due: int | None = FIRST[name]  # of the line that comes next; None: not told
    for key in [*counting, None]:
        begin = number_of_first_line(name, tail) if key is None else _number(key)
        while due is not None and begin is not None and due < begin:
            if (unlisted := _get_unlisted(store, _key(name, due))) is None:
                break
            yield _key(name, due), unlisted
            due = _following(name, unlisted, due)
        if key is None:
            return
        body = None if known is not None and key in known.sizes else store.get(key)
        yield key, body
        due = None if body is None else _following(name, body, _number(key))


def _get_unlisted(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except StoreError as error:
        if error.kind is FailureKind.MISSING:
            return None
        raise


def _following(name: str, body: bytes, begin: int) -> int | None:
    """The number after that of the last line of a segment."""
    last = number_of_first_line(name, body[body.rstrip(b"\n").rfind(b"\n") + 1 :])
    return None if last is None or last < begin else last + 1


def _unchanged(tail: bytes, known: Found) -> Found | None:
    """With the same segments, or with none; None where that can't be told by its first line."""
    now = Found(tail)
    if not tail:
        return now
    return replace(known, tail=tail, bodies={}) if now.head and now.head == known.head else None


def read_whole(store: Store, name: str) -> bytes:
    """The content of a file. Raises StoreError, of kind MISSING if there is no such file."""
    return read_segments(store, name).whole()


def join_copies(folder: Path, replace: Callable[[Path, bytes], None]) -> None:
    """A local folder that was copied from a remote one has its files in one piece from now on."""
    for name in NUMBERS:
        path = folder / name
        if (folder / SEGMENTS / name).is_dir() and path.exists():
            # It begins before every segment: none counts any more.
            replace(path, read_whole(open_store(str(folder)), name))
            shutil.rmtree(folder / SEGMENTS / name)


def listed(store: Store, name: str) -> list[str]:
    """The keys of its segments, in their order."""
    prefix = f"{SEGMENTS}/{name}"
    return [key for key in store.list(prefix) if key.removeprefix(f"{prefix}/").isdecimal()]


def _key(name: str, number: int) -> str:
    return f"{SEGMENTS}/{name}/{number:015}"


def _counts(key: str, name: str, tail: bytes) -> bool:
    if not tail:
        return False
    begins = number_of_first_line(name, tail)
    return begins is None or _number(key) < begins


def _number(key: str) -> int:
    return int(key.rpartition("/")[2])


def number_of_first_line(name: str, content: bytes) -> int | None:
    """Of its first line; None where that has none."""
    try:
        line = json.loads(content[: content.find(b"\n") + 1])
        number = line[NUMBERS[name]]
    except MALFORMED:
        return None
    return number if isinstance(number, int) and number >= 0 else None


@dataclass(frozen=True, slots=True)
class _Closed:
    key: str
    size: int
    digest: bytes


class Mirror:
    """Uploads one growing file. One thread at a time."""

    def __init__(
        self, store: Store, name: str, check: Callable[[], None], segment_bytes: int
    ) -> None:
        """``check`` is called before anything is put or deleted, and raises if that may not be."""
        self._store, self._name, self._check = store, name, check
        self._segment_bytes = segment_bytes
        self._closed: list[_Closed] = []
        self._ignored: list[str] = []  # segments in the store that don't count

    def fetch(self) -> bytes:
        """The file as the store has it. Raises StoreError, of kind MISSING if there is none."""
        found = read_segments(self._store, self._name)
        self._closed = [_closed(key, body) for key, body in found.bodies.items()]
        self._ignored = list(found.ignored)
        return found.whole()

    def upload(self, file: BinaryIO, size: int, replaced: bool) -> int:
        """The whole lines of the file's first ``size`` bytes are in the store. Returns bytes sent.

        Args:
            replaced: since the last upload, by a file that may not begin with the same bytes.

        Raises StoreFailed, OSError, what ``check`` raises: another upload then goes on.
        """
        if replaced:
            self._keep_unchanged(file)
        rest, sent = self._rest(file, size), 0
        if self._ignored:
            sent = self._put_tail(rest)
            self._delete_ignored()
        *segments, tail = self._cut(rest)
        if segments:
            self._clear_way({self._key_of(segment) for segment in segments})
            for segment in segments:
                self._close(segment)
                sent += len(segment)
        if segments or not sent:
            sent += self._put_tail(tail)
        return sent

    def _keep_unchanged(self, file: BinaryIO) -> None:
        file.seek(0)
        for number, closed in enumerate(self._closed):
            if _closed(closed.key, file.read(closed.size)) != closed:
                self._ignored += [other.key for other in self._closed[number:]]
                del self._closed[number:]
                return

    def _rest(self, file: BinaryIO, size: int) -> bytes:
        """The whole lines after the closed segments: none only where the file has none, for an
        empty tail says that no segment counts."""
        while True:
            begin = sum(closed.size for closed in self._closed)
            file.seek(begin)
            rest = file.read(max(0, size - begin))
            rest = rest[: rest.rfind(b"\n") + 1]
            if rest or not self._closed:
                return rest
            self._ignored.append(self._closed.pop().key)

    def _cut(self, rest: bytes) -> Iterator[bytes]:
        """The segments to close, and the tail."""
        while len(rest) > self._segment_bytes:
            end = (rest.rfind(b"\n", 0, self._segment_bytes) + 1) or (rest.find(b"\n") + 1)
            first, following = (
                number_of_first_line(self._name, rest),
                number_of_first_line(self._name, rest[end:]),
            )
            if first is None or following is None or following <= first:
                break  # one long line, or a foreign one
            yield rest[:end]
            rest = rest[end:]
        yield rest

    def _key_of(self, segment: bytes) -> str:
        number = number_of_first_line(self._name, segment)
        assert number is not None
        return _key(self._name, number)

    def _clear_way(self, mine: Collection[str]) -> None:
        """Deletes what an earlier controller may have left, or put late."""
        ours = {closed.key for closed in self._closed} | set(mine)
        self._ignored = [key for key in listed(self._store, self._name) if key not in ours]
        self._delete_ignored()

    def _close(self, segment: bytes) -> None:
        """A superseded controller that puts late can't change a segment: it must be absent."""
        key = self._key_of(segment)
        self._check()
        if not self._store.put_if_absent(key, segment) and self._store.get(key) != segment:
            self._store.put(key, segment, self._check)
        self._closed.append(_closed(key, segment))

    def _put_tail(self, tail: bytes) -> int:
        self._store.put(self._name, tail, self._check)
        return len(tail)

    def _delete_ignored(self) -> None:
        while self._ignored:
            self._check()
            self._store.delete(self._ignored[-1])
            self._ignored.pop()


def _closed(key: str, body: bytes) -> _Closed:
    return _Closed(key, len(body), hashlib.sha256(body).digest())
