"""The filesystems under a store, and what their errors mean.

``Local`` (of ``local_files``) makes objects appear whole by itself, ``Mounted`` is the same in a
mount that may hang, ``Objects`` are those of S3, Google and Azure, ``Remote`` is any other fsspec
filesystem. None retries: that is ``store.Store``'s part.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from fsspec.registry import registry  # type: ignore[import-untyped]

from elastic_ft.errors import StorageError, one_line, redacted
from elastic_ft.storage.kinds import (
    OBJECT_STORES,
    PIECE_BYTES,
    Backend,
    Bytes,
    FailureKind,
)
from elastic_ft.storage.local_files import Local
from elastic_ft.storage.mounted import Mounted
from elastic_ft.storage.mounts import can_hang

REMOTE_PIECE_BYTES = 32 * PIECE_BYTES


def backend_of(url: str) -> tuple[Backend, str]:
    """The filesystem for a local path or URL, and the URL in its clean form.

    Raises StorageError if no installed filesystem understands it, or if it holds a secret.
    """
    if redacted(url) != url:
        raise StorageError(
            f"{url}: a URL with a password or a token would stand in journals and manifests: put "
            "it into the environment (AWS_SECRET_ACCESS_KEY, FSSPEC_FTP_PASSWORD) instead"
        )
    protocol, path = fsspec.core.split_protocol(url)
    if protocol in (None, "file", "local"):
        root = Path(LocalFileSystem._strip_protocol(url)).absolute()
        return (Mounted if can_hang(root) else Local)(root), str(root)
    try:
        if protocol in OBJECT_STORES:
            return _objects().Objects(protocol, path), url.rstrip("/")
        check_protocol(url)
        fs, root_path = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
    except ImportError as error:  # of a client that is not installed: fsspec says which
        raise StorageError(f"{url}: {error}") from error
    except ValueError as error:
        raise StorageError(f"{url}: {one_line(error)}") from error
    return Remote(fs, root_path.rstrip("/")), url.rstrip("/")


def check_protocol(url: str) -> None:
    """Raises StorageError, which says what there is, where nobody knows the URL's."""
    protocol, _ = fsspec.core.split_protocol(url)
    if not {*(protocol or "file").split("::")} <= {*fsspec.available_protocols(), *registry}:
        raise StorageError(
            f"{url}: {protocol}:// is not known: expected a path, "
            f"{', '.join(f'{name}://' for name in OBJECT_STORES)}, or another of fsspec's, such as "
            "sftp:// or webhdfs://"
        )


class Remote:
    """Any other fsspec filesystem. Known well: memory.

    Elsewhere a new object may be visible before it is whole (a reader's digests refuse it), and
    ``create`` has as many winners as the filesystem's ``pipe_file(mode="create")`` allows.
    """

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        # Memory files are shared objects with one read position, and "create" looks before it
        # leaps: one thread at a time, in the one process that has this memory.
        self._lock: Any = _MEMORY if isinstance(fs, MemoryFileSystem) else None

    def _do(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self._fs, method)
        if isinstance(self._fs, AsyncFileSystem):  # its wrappers take a timeout
            return call(*args, timeout=timeout_s, **kwargs)
        if self._lock is None:
            return call(*args, **kwargs)
        with self._lock:
            return call(*args, **kwargs)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        self._do("pipe_file", timeout_s, self._path(key), b"".join(parts))

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        try:
            self._do("pipe_file", timeout_s, self._path(key), data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes:
        return bytes(self._do("cat_file", timeout_s, self._path(key), start=start, end=end))

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[bytes]:
        """A request for each piece: few filesystems hand on what has come of an answer."""
        while start < end:
            piece = self.get(key, start, min(end, start + REMOTE_PIECE_BYTES), silent_s)
            yield piece
            start += len(piece)
            if len(piece) < REMOTE_PIECE_BYTES:
                return

    def size(self, key: str, timeout_s: float) -> int:
        info = self._do("info", timeout_s, self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{key} is a folder")
        return int(info["size"])

    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        top = self._path(prefix.rstrip("/"))
        try:
            found = self._do("find", timeout_s, top)
            if not found:  # its walk leaves out what it can't list: a server that is away, say
                self._do("ls", timeout_s, top)
        except FileNotFoundError:
            return []
        inside = f"{top}/"
        return [
            path[len(self._root) + 1 :]
            for path in found
            if path.startswith(inside) and not path.endswith("/")
        ]

    def delete(self, key: str, timeout_s: float) -> None:
        if self._lock is None or self._do("isfile", timeout_s, self._path(key)):
            self._do("rm_file", timeout_s, self._path(key))


_MEMORY = threading.Lock()


# ------------------------------------------------------------------------------- errors


def _objects() -> ModuleType:
    """Its client is of use for their URLs alone."""
    from elastic_ft.storage import objects

    return objects


def explain(error: BaseException) -> tuple[FailureKind, str]:
    """What went wrong, and one line about it, for whatever a filesystem raised."""
    if "obstore" in sys.modules and (explained := _objects().explain(error)):
        return explained
    why = one_line(error)
    if type(error) is TimeoutError and error.errno is None and error.args:  # ours, in words
        return FailureKind.UNREACHABLE, str(error)
    if isinstance(error, OSError) and error.strerror and error.errno == errno.ENOSPC:
        return FailureKind.FAILED, error.strerror
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return FailureKind.MISSING, why
    if isinstance(error, PermissionError):
        return FailureKind.FORBIDDEN, why
    if _is_network(error):
        return FailureKind.UNREACHABLE, why
    return FailureKind.FAILED, why


def _is_network(error: BaseException) -> bool:
    """A broken or silent connection, in the words of the clients that are loaded."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if type(error).__module__.partition(".")[0] == "aiohttp":
        from aiohttp import ClientError

        return isinstance(error, ClientError)
    return False
