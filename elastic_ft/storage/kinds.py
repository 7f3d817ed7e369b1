"""What a store needs of a filesystem, and why its operations fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol

Bytes = bytes | bytearray | memoryview

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0  # without a single byte
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az")  # protocols of ``objects``
PIECE_BYTES = 1 << 18  # of a streamed object


class FailureKind(StrEnum):
    """Why an operation failed, as far as the caller can act on it."""

    MISSING = "missing"
    NO_BUCKET = "no such bucket"  # says nothing of the object
    FORBIDDEN = "forbidden"
    UNREACHABLE = "unreachable"  # no connection, no answer in time, cut or damaged: retried
    BUSY = "busy"  # the server asks to come again (429, 5xx): retried
    CONFLICT = "conflict"  # S3 409: two conditional writes at once, neither done: retried
    FAILED = "failed"


class Backend(Protocol):
    """What a store needs of a filesystem: the seam where tests inject faults.

    Each method makes one attempt within ``timeout_s`` and raises what the filesystem raises.
    ``get`` returns anything that ``memoryview`` takes. ``stream`` yields the bytes [start, end) in
    pieces of about PIECE_BYTES; it takes as long as they come: ``silent_s`` bounds each wait.
    ``list`` may leave out keys up to ``after``, and need not.
    """

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None: ...
    def create(self, key: str, data: bytes, timeout_s: float) -> bool: ...
    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Bytes: ...
    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[Bytes]: ...
    def size(self, key: str, timeout_s: float) -> int: ...
    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]: ...
    def delete(self, key: str, timeout_s: float) -> None: ...
