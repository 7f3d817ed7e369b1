"""The filesystems under a store, and what their errors mean.

``Local`` makes objects appear whole by itself; ``Remote`` is any other fsspec filesystem, known
well for S3 and memory. Neither retries: that is ``store.Store``'s part.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from elastic_ft.errors import StorageError

Bytes = bytes | bytearray | memoryview

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0  # without a single byte
TMP_SUFFIX = ".tmp~"  # of local files not yet whole; never listed
S3_PROTOCOLS = ("s3", "s3a")


class Kind(StrEnum):
    """Why an operation failed, as far as the caller can act on it."""

    MISSING = "missing"
    FORBIDDEN = "forbidden"
    UNREACHABLE = "unreachable"  # no connection, or no answer in time: retried
    BUSY = "busy"  # the server asks to come again (429, 5xx): retried
    CONFLICT = "conflict"  # S3 409: two conditional writes at once, neither done: retried
    FAILED = "failed"


class Backend(Protocol):
    """What a store needs of a filesystem: the seam where tests inject faults.

    Each method makes one attempt within ``timeout_s`` and raises what the filesystem raises.
    """

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None: ...
    def create(self, key: str, data: bytes, timeout_s: float) -> bool: ...
    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes: ...
    def size(self, key: str, timeout_s: float) -> int: ...
    def list(self, prefix: str, timeout_s: float) -> list[str]: ...
    def delete(self, key: str, timeout_s: float) -> None: ...
    def check_root(self, timeout_s: float) -> None: ...


def backend_of(url: str) -> tuple[Backend, str]:
    """The filesystem for a local path or fsspec URL, and the URL in its clean form.

    Raises StorageError if no installed filesystem understands it.
    """
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if protocol in ("file", "local"):
        root = Path(LocalFileSystem._strip_protocol(url)).absolute()
        return Local(root), str(root)
    options = _s3_options() if protocol in S3_PROTOCOLS else {}
    try:
        fs, root_path = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except (ValueError, ImportError) as error:
        raise StorageError(f"{url}: {one_line(error)}") from error
    if protocol in S3_PROTOCOLS:
        fs.retries = 1
    return Remote(fs, root_path.rstrip("/")), url.rstrip("/")


def _s3_options() -> dict[str, Any]:
    return {
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "max_pool_connections": 32,
        }
    }


class Local:
    """A local or mounted folder. Objects appear by rename or hard link, after fsync."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        target = self._root / key
        with self._whole(target, parts) as tmp:
            tmp.replace(target)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        target = self._root / key
        with self._whole(target, [data]) as tmp:
            try:
                os.link(tmp, target)  # unlike rename, fails if the target exists
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _whole(self, target: Path, parts: Sequence[Bytes]) -> Iterator[Path]:
        """A complete, synced temporary file beside ``target``; then syncs the folder."""
        _make_folder(target.parent)
        tmp = target.with_name(f".{target.name}.{secrets.token_hex(6)}{TMP_SUFFIX}")
        try:
            with tmp.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file, part)
                os.fsync(file.fileno())
            yield tmp
        finally:
            tmp.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes:
        with (self._root / key).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def size(self, key: str, timeout_s: float) -> int:
        path = self._root / key
        if path.is_dir():
            raise FileNotFoundError(f"{path} is a folder")
        return path.stat().st_size

    def list(self, prefix: str, timeout_s: float) -> list[str]:
        top = self._root / prefix
        return [
            Path(folder, name).relative_to(self._root).as_posix()
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing)
            for name in names
            if not name.endswith(TMP_SUFFIX)
        ]

    def delete(self, key: str, timeout_s: float) -> None:
        path = self._root / key
        if path.is_dir():  # its objects were deleted by key: what is left is empty or half-written
            _remove_leftovers(path)
        else:
            path.unlink()

    def check_root(self, timeout_s: float) -> None:
        _make_folder(self._root)


class Remote:
    """Any other fsspec filesystem. Known well: S3 (conditional PUT) and memory.

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
        except OSError as error:
            if _s3_status(error) == 412:
                return False
            raise
        return True

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes:
        try:
            found = self._do("cat_file", timeout_s, self._path(key), start=start, end=end)
        except OSError as error:
            if _s3_status(error) == 416:  # the range begins behind the end, as in a short file
                return b""
            raise
        return bytes(found)

    def size(self, key: str, timeout_s: float) -> int:
        info = self._do("info", timeout_s, self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(f"{key} is a folder")
        return int(info["size"])

    def list(self, prefix: str, timeout_s: float) -> list[str]:
        top = self._path(prefix.rstrip("/"))
        try:
            found = self._do("find", timeout_s, top)
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

    def check_root(self, timeout_s: float) -> None:
        if "s3" not in self._fs.protocol:
            return
        bucket = self._root.split("/")[0]
        try:
            self._do("info", timeout_s, bucket)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no bucket {bucket}") from error
        except PermissionError as error:
            # Looking at a bucket may be forbidden where writing into it is not: the probe tells.
            if _s3_code(error) not in ("403", "AccessDenied"):
                raise


_MEMORY = threading.Lock()


def _write_all(file: Any, part: Bytes) -> None:
    rest = memoryview(part).cast("B")
    while rest.nbytes:
        rest = rest[file.write(rest) :]  # the kernel takes at most 2 GiB at once


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


# ------------------------------------------------------------------------------- errors


def explain(error: BaseException) -> tuple[Kind, str]:
    """What went wrong, and one line about it, for whatever a filesystem raised."""
    code, status = _s3_code(error), _s3_status(error)
    why = f"{code}: {one_line(error)}" if code else one_line(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return Kind.MISSING, why
    if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
        return Kind.FORBIDDEN, why
    if status == 409 and code == "ConditionalRequestConflict":
        return Kind.CONFLICT, why
    if code == "SlowDown" or status == 429 or (status or 0) >= 500:
        return Kind.BUSY, why
    if _is_network(error):
        return Kind.UNREACHABLE, why
    return Kind.FAILED, why


def _is_network(error: BaseException) -> bool:
    """A broken or silent connection, in the words of the clients that are loaded."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    package = type(error).__module__.partition(".")[0]
    if package == "botocore":
        from botocore import exceptions, parsers  # type: ignore[import-untyped]

        torn = (exceptions.IncompleteReadError, parsers.ResponseParserError)
        return isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError, *torn))
    if package == "aiohttp":
        from aiohttp import ClientError

        return isinstance(error, ClientError)
    return False


def _s3_response(error: BaseException) -> dict[str, Any]:
    """The S3 answer behind an error: s3fs chains botocore's as the cause."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _s3_code(error: BaseException) -> str:
    return str(_s3_response(error).get("Error", {}).get("Code", ""))


def _s3_status(error: BaseException) -> int | None:
    status = _s3_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return None if status is None else int(status)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    name = type(error).__name__
    return f"{name}: {text}" if text else name
