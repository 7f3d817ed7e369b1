"""Objects under a URL: whole writes, one-winner writes, range reads, over any URL.

A key is a relative path with ``/``. Whatever the filesystem, a reader sees an object whole or not
at all, except where ``backends.Remote`` says so. Nothing is cached; every call may come from any
thread; every call ends by the store's deadline (a local disk's own I/O can't be interrupted, but
by ``cancellable``), which for ``read`` follows the bytes that come.

Retries happen in one place, ``Store._call``: the clients' own are switched off.

A store belongs to the process that opened it: client threads and sockets don't survive a fork.
"""

from __future__ import annotations

import copy
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from elastic_ft.errors import ElasticError, StorageError, StoreFailed
from elastic_ft.storage.backends import backend_of, explain
from elastic_ft.storage.kinds import Backend, Bytes, FailureKind

T = TypeVar("T")

ATTEMPTS = 4  # per call, the first included
PAUSES_S = (0.1, 0.4, 1.6)  # between them
CHECK_DEADLINE_S = 15.0  # of check_access as a whole
CHECK_ATTEMPTS = 2
DELETE_THREADS = 8


class StoreError(StoreFailed):
    """StoreFailed with its ``kind``. After a failed write the object may or may not be there."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreError, (str(self), self.kind)


def if_there(read: Callable[[], T]) -> T | None:
    """What ``read`` returns; None where its object is missing. Raises StoreError of other kinds."""
    try:
        return read()
    except StoreError as error:
        if error.kind is not FailureKind.MISSING:
            raise
    return None


class Deadline:
    """Seconds from now, or from when it was last renewed."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self.renew()

    def renew(self) -> None:
        self._end_s = time.monotonic() + self._after_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class Store:
    """Objects under ``url``. Every method raises StoreError, one line, after bounded retries."""

    def __init__(
        self, url: str, backend: Backend, deadline_s: float = 60, attempts: int = ATTEMPTS
    ) -> None:
        self.url = url
        self.backend = backend
        self.deadline_s = deadline_s
        self.attempts = attempts
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def within(self, deadline_s: float) -> Store:
        """The same, with another deadline."""
        other = copy.copy(self)
        other.deadline_s = deadline_s
        return other

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def put(
        self, key: str, data: Bytes | Sequence[Bytes], check: Callable[[], None] = lambda: None
    ) -> None:
        """Writes the object, replacing an older one: the parts, one after the other.

        They are copied by ``Remote`` alone, and must not change before this returns.

        Args:
            check: called before each attempt; what it raises ends them.
        """
        parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data

        def attempt(left_s: float) -> None:
            check()
            self.backend.put(key, parts, left_s)

        self._call("write", key, attempt)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """True if this call created the object; False if the key exists. One winner of many.

        Never repeated once it may have been done, for then one's own object would refuse the
        repetition. After a StoreError the object may be there: a caller who must know puts a
        nonce into ``data`` and reads it back.
        """
        whole = bytes(data)
        return self._call(
            "create",
            key,
            lambda left_s: self.backend.create(key, whole, left_s),
            retried=(FailureKind.CONFLICT,),
        )

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The object's bytes [start, end). Fewer come back where the object is shorter."""
        if start is not None and end is not None and start >= end:
            return b""
        found = self._call("read", key, lambda left_s: self.backend.get(key, start, end, left_s))
        return bytes(found)

    def read(self, key: str, start: int, end: int) -> memoryview:
        """The object's bytes [start, end), however many there are and however long they take.

        The deadline is of silence: it begins anew with every piece. A retry goes on where the
        attempt before it broke off. Fewer bytes come back where the object is shorter.
        """
        buffer = np.empty(max(0, end - start), np.uint8)
        deadline, at = Deadline(self.deadline_s), 0

        def attempt(left_s: float) -> None:
            nonlocal at
            if start + at >= end:
                return
            for piece in self.backend.stream(key, start + at, end, left_s):
                received = np.frombuffer(piece, np.uint8)[: len(buffer) - at]
                buffer[at : at + len(received)] = received
                at += len(received)
                deadline.renew()

        self._call("read", key, attempt, deadline=deadline)
        return memoryview(buffer[:at])

    def size(self, key: str) -> int:
        """Bytes of the object. StoreError of kind MISSING if there is none."""
        return self._call("look up", key, lambda left_s: self.backend.size(key, left_s))

    def exists(self, key: str) -> bool:
        return if_there(lambda: self.size(key)) is not None

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        """Keys of all objects in the folder ``prefix``, at any depth, sorted; [] if none.
        ``after``: those alone that sort behind that key: of many the others are not asked for."""
        found = self._call("list", prefix, lambda left_s: self.backend.list(prefix, left_s, after))
        return sorted(key for key in found if key > after)

    def delete(self, prefix: str) -> None:
        """Deletes the object of that key and all in the folder of that name. None is no error."""
        if not prefix.strip("/"):
            raise ValueError("an empty prefix would delete everything")
        with ThreadPoolExecutor(DELETE_THREADS) as pool:
            list(pool.map(self._delete_one, self.list(prefix)))
        self._delete_one(prefix)

    def _delete_one(self, key: str) -> None:
        if_there(lambda: self._call("delete", key, lambda left_s: self.backend.delete(key, left_s)))

    def _call(
        self,
        verb: str,
        key: str,
        attempt: Callable[[float], T],
        retried: tuple[FailureKind, ...] = (FailureKind.UNREACHABLE, FailureKind.BUSY),
        deadline: Deadline | None = None,
    ) -> T:
        """Runs ``attempt(seconds left)``; repeats what is worth repeating, within the deadline."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self!r} was opened in process {self._pid}: open it in this one")
        _check_key(key)
        deadline = deadline or Deadline(self.deadline_s)
        for number in range(1, self.attempts + 1):
            try:
                return attempt(max(0.1, deadline.left_s))
            except ElasticError:  # of a check
                raise
            except Exception as error:  # any fsspec backend may raise anything: map it all
                kind, why = explain(error)
                pause_s = PAUSES_S[min(number, len(PAUSES_S)) - 1]
                late = pause_s >= deadline.left_s
                if kind not in retried or number == self.attempts or late:
                    times = f" ({number} attempts)" if number > 1 else ""
                    message = f"cannot {verb} {self.url_of(key)}: {kind}: {why}{times}"
                    raise StoreError(message, kind) from error
            self.rest(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def rest(self, pause_s: float) -> None:
        """Before an attempt. Shorter once the store is closed: the attempt then says so."""
        time.sleep(pause_s)


def open_store(url: str, *, deadline_s: float = 60) -> Store:
    """The store under a local path or any fsspec URL; nothing is contacted or created yet.

    S3 takes its endpoint from AWS_ENDPOINT_URL, region and keys from wherever botocore finds
    them; Google and Azure from their usual variables. ``deadline_s`` bounds each call with its
    retries. Raises StorageError for a URL that no installed filesystem understands.
    """
    backend, clean_url = backend_of(url)
    return Store(clean_url, backend, deadline_s)


def check_access(url: str) -> tuple[str, ...]:
    """Writes, reads and deletes a small probe under ``url``, within CHECK_DEADLINE_S.

    Returns warnings, in words (a store without one-winner writes). Raises StorageError, one line
    that tells apart: unreachable, forbidden, missing (no such bucket), not understood.
    """
    backend, clean_url = backend_of(url)
    end_s = time.monotonic() + CHECK_DEADLINE_S

    def store() -> Store:
        return Store(clean_url, backend, end_s - time.monotonic(), CHECK_ATTEMPTS)

    key, probe = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        created = store().put_if_absent(key, probe)
        again = store().put_if_absent(key, probe)
        found = store().get(key)
        store().delete(key)
    except StoreError as error:
        raise StorageError(str(error)) from error
    if not created or found != probe:
        raise StorageError(f"{url}: reads back something else than was written")
    if again:
        return (
            f"{url} ignores conditional writes (If-None-Match): two controllers with this "
            f"checkpoint URL would not notice each other",
        )
    return ()


def _check_key(key: str) -> None:
    if key.startswith("/") or ".." in key.split("/"):
        raise ValueError(f"not a key: {key!r}")
