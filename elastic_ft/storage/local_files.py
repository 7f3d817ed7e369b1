"""Objects that are files of a folder: what a process does itself, or has ``mount_helper`` do.

It imports next to nothing: that helper is small, and begins fast.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from elastic_ft.storage.kinds import PIECE_BYTES, Bytes

TMP_SUFFIX = ".tmp~"  # of files not yet whole; never listed
PRIVATE = ("job.yaml", "inbox.jsonl")  # of a run folder: may hold what is nobody else's business
PRIVATE_BEGIN = "submission-"
SYNC_BYTES = 64 << 20  # no longer than that is a disk, or a server, waited for at a time
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Part(NamedTuple):
    """Of a file that is open."""

    file: FileIO
    start: int
    nbytes: int


class Local:
    """A local or mounted folder. Objects appear by rename or hard link, after fsync."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, parts: Iterable[Bytes], timeout_s: float) -> None:
        target = self._root / key
        with self._whole(target, parts) as tmp:
            tmp.replace(target)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        target = self._root / key
        with self._whole(target, [data]) as tmp:
            try:
                os.link(tmp, target)  # unlike rename, fails if the target exists
            except FileExistsError:
                return tmp.stat().st_nlink > 1  # a server's answer was lost: it was asked twice
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                return _create_in_place(target, data)
        return True

    @contextmanager
    def _whole(self, target: Path, parts: Iterable[Bytes]) -> Iterator[Path]:
        """A complete, synced temporary file beside ``target``; then syncs the folder."""
        _make_folder(target.parent)
        tmp = target.with_name(f".{target.name}.{secrets.token_hex(6)}{TMP_SUFFIX}")
        try:
            with open(tmp, "xb", buffering=0, opener=self._opener(target)) as file:
                unsynced = 0
                for part in parts:
                    unsynced += _write_all(file, part)
                    if unsynced >= SYNC_BYTES:
                        os.fdatasync(file.fileno())
                        unsynced = 0
                os.fsync(file.fileno())
            yield tmp
        finally:
            tmp.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def _opener(self, target: Path) -> Callable[[str, int], int]:
        mode = 0o600 if is_private(target.relative_to(self._root).as_posix()) else 0o666
        return lambda path, flags: os.open(path, flags, mode)

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes:
        with (self._root / key).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[bytes]:
        with (self._root / key).open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (piece := file.read(min(PIECE_BYTES, end - start))):
                yield piece
                start += len(piece)

    def part(self, key: str, start: int, end: int | None) -> Part:
        """Of the file as it is now."""
        file = (self._root / key).open("rb", buffering=0)
        size = os.fstat(file.fileno()).st_size
        return Part(file, start, max(0, (size if end is None else min(end, size)) - start))

    def size(self, key: str, timeout_s: float) -> int:
        path = self._root / key
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a folder")
        return path.stat().st_size

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        found = list[str]()
        for folder, _, names in os.walk(self._root / prefix, onerror=_raise_unless_missing):
            inside = Path(folder).relative_to(self._root).as_posix()
            where = "" if inside == "." else f"{inside}/"
            found += [where + name for name in names if not name.endswith(TMP_SUFFIX)]
        return found

    def delete(self, key: str, timeout_s: float) -> None:
        path = self._root / key
        if path.is_dir():  # its objects were deleted by key: what is left is empty or half-written
            _remove_leftovers(path)
        else:
            path.unlink()


def is_private(key: str) -> bool:
    """Readable for its owner alone."""
    parts = key.split("/")
    return any(part in PRIVATE or part.startswith(PRIVATE_BEGIN) for part in parts)


def _create_in_place(target: Path, data: bytes) -> bool:
    """Where there are no hard links. One that dies within leaves a part: readers refuse it."""
    try:
        with target.open("xb", buffering=0) as file:
            _write_all(file, data)
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _write_all(file: Any, part: Bytes) -> int:
    """Returns the bytes."""
    rest = memoryview(part).cast("B")
    nbytes = rest.nbytes
    while rest.nbytes:
        rest = rest[file.write(rest) :]  # the kernel takes at most 2 GiB at once
    return nbytes


def _make_folder(folder: Path) -> None:
    """mkdir -p, each new entry synced into its parent."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync_folder(new.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _remove_leftovers(folder: Path) -> None:
    for tmp in folder.rglob(f"*{TMP_SUFFIX}"):
        tmp.unlink(missing_ok=True)
    for below in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        _remove_if_empty(below)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty, or someone else removed it: both are fine
        folder.rmdir()
