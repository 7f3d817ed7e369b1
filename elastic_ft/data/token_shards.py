"""Token ids in files that nobody copies: a sample is read, by its range of bytes, as it is needed.

A corpus of any size is there at once: its files are listed, and a few of their bytes are read.
"""

from __future__ import annotations

import hashlib
import posixpath
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_ft.config import DataConfig
from elastic_ft.data.sources import DataSource, find_source
from elastic_ft.errors import DataError, StorageError
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store

READERS = 16  # requests at once; a sample waits for one answer, not for others' to come first
OUTAGE_S = 45.0  # a store that is away for so long fails the sample
PAUSE_S = 1.0
PROBES, PROBE_BYTES = 16, 4096  # read for the fingerprint
PASSING = (FailureKind.UNREACHABLE, FailureKind.BUSY)


@dataclass(frozen=True)
class Shards:
    """Files of little-endian unsigned token ids.

    Attributes:
        url: of the folder that they have in common.
        keys: of the files in it, in their order.
        windows: in each file; what is left at its end is not read.
        length: tokens of a window.
    """

    url: str
    keys: tuple[str, ...]
    windows: tuple[int, ...]
    length: int
    token_bytes: int
    vocab_size: int

    @property
    def count(self) -> int:
        return sum(self.windows)


class TokenShards:
    """Consecutive windows, none of which crosses the end of a file.

    ``shards[i]`` is ``{"tokens": int64 [length]}``. Pickles as its arguments; any thread may read.

    Args:
        first, count: of all windows, those that are this dataset's.
    """

    def __init__(self, shards: Shards, first: int, count: int) -> None:
        self._shards, self._first, self._count = shards, first, count
        self._ends = list(accumulate(shards.windows))
        self._store: Store | None = None
        self._readers: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Raises DataError for an id outside the vocabulary; StoreFailed after OUTAGE_S."""
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of a dataset of {self._count}")
        shards, window = self._shards, self._first + index
        file = bisect_right(self._ends, window)
        within = window - (self._ends[file] - shards.windows[file])
        size = shards.length * shards.token_bytes
        key, start = shards.keys[file], within * size
        read = _read(self._open(), key, start, start + size)
        if len(read) != size:
            raise DataError(f"data.url: {shards.url}/{key} has become shorter than {start + size}")
        ids = np.frombuffer(read, f"<u{shards.token_bytes}").astype("i8")
        if (largest := int(ids.max())) >= shards.vocab_size:
            raise DataError(
                f"data.url: {shards.url}/{key}: token {largest}, within {shards.length} from token "
                f"{within * shards.length}, is outside data.vocab_size {shards.vocab_size}"
            )
        return {"tokens": torch.from_numpy(ids)}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Several samples, read at the same time."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "token-shards")
        return list(self._readers.map(self.__getitem__, indices))

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the samples as rows, int64 [samples, length]."""
        return {"tokens": torch.stack([sample["tokens"] for sample in samples])}

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Any, ...]]:
        return TokenShards, (self._shards, self._first, self._count)

    def _open(self) -> Store:
        if self._store is None:  # of the process that reads
            self._store = open_store(self._shards.url)
        return self._store


def find_shards(config: DataConfig) -> tuple[Shards, str]:
    """The shards behind ``config.url``, and what tells them from others: names, sizes, and some
    bytes of some of them. Raises DataError, StorageError."""
    source = find_source(config)
    token_bytes, length = config.token_bytes, config.sequence_length + 1
    for file in source.files:
        if file.size_bytes % token_bytes:
            raise DataError(
                f"data.url: {file.name}: {file.size_bytes} bytes are no whole number of "
                f"{token_bytes}-byte tokens (see data.token_bytes)"
            )
    base = posixpath.commonpath([posixpath.dirname(file.path) for file in source.files])
    windows = [file.size_bytes // (token_bytes * length) for file in source.files]
    if config.max_tokens is not None:
        windows = _at_most(windows, config.max_tokens // length)
    shards = Shards(
        url=source.fs.unstrip_protocol(base),
        keys=tuple(posixpath.relpath(file.path, base) for file in source.files),
        windows=tuple(windows),
        length=length,
        token_bytes=token_bytes,
        vocab_size=config.vocab_size,
    )
    try:
        return shards, _fingerprint(shards, source)
    except StoreError as error:
        raise StorageError(f"data.url: {error}") from error


def _at_most(windows: list[int], wanted: int) -> list[int]:
    """``windows`` with ``wanted`` in all: the first ones."""
    kept = []
    for count in windows:
        kept.append(min(count, wanted))
        wanted -= kept[-1]
    return kept


def _fingerprint(shards: Shards, source: DataSource) -> str:
    """Equal for copies of the same files elsewhere: no times, no places."""
    found = hashlib.sha256(repr((shards.windows, shards.length, shards.token_bytes)).encode())
    store = open_store(shards.url)
    for number, (key, file) in enumerate(zip(shards.keys, source.files, strict=True)):
        found.update(repr((key, file.size_bytes)).encode())
        if number % -(-len(shards.keys) // PROBES) == 0:
            found.update(store.get(key, 0, PROBE_BYTES))
    return found.hexdigest()


def _read(store: Store, key: str, start: int, end: int) -> bytes:
    """Asks a store that is away for a while again and again."""
    end_s = time.monotonic() + OUTAGE_S
    while True:
        try:
            return store.get(key, start, end)
        except StoreError as error:
            if error.kind not in PASSING or time.monotonic() + PAUSE_S > end_s:
                raise
        time.sleep(PAUSE_S)
