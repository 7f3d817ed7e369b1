"""Tensor pieces to and from objects, in parallel, with a digest for each (I5).

An object is the bytes of some boxes, one after the other; a ``ShardEntry`` says where each lies.
Any cut of a tensor can be read from any other cut of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import xxhash

from elastic_ft.core.manifest import Manifest, ShardEntry, incomplete
from elastic_ft.core.sharding import Box, slabs
from elastic_ft.errors import OutOfTime, StateDamaged, StoreFailed, printable
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError

A = TypeVar("A")
R = TypeVar("R")

OBJECT_BYTES = 64 * 2**20  # of a shard object and of one read
THREADS = 4  # concurrent transfers, each with one object in memory
OBJECT_DEADLINE_S = 180.0  # to write one, with its retries
READS = 2  # of a run, before it is called damaged

StatePiece = tuple[str, Box, str, memoryview]  # tensor, box, dtype, its bytes in row-major order


def digest(data: bytes | memoryview) -> str:
    """As ShardEntry has it. Finds damage, not forgery."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def attempt_prefix(run: str, generation: int, step: int) -> str:
    """Where one attempt to write one checkpoint puts its shards."""
    if not run or "/" in run:
        raise ValueError(f"run must be a name without '/', found {run!r}")
    return f"data/{run}/g{generation}-s{step}"


def prefix_of(manifest: Manifest) -> str:
    """Where the shards of a checkpoint are."""
    return attempt_prefix(manifest.run, manifest.generation, manifest.step)


# ------------------------------------------------------------------------------- writing


class RateLimit:
    """A bound on bytes per second over all threads: each waits until its bytes are due.

    Attributes:
        until_s: monotonic; nobody waits for what is due later.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self.until_s = bytes_per_s, math.inf
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int, store: Store) -> None:
        """``store``: where they come from or go to; once it is closed, nothing is waited for.
        Raises OutOfTime."""
        with self._lock:
            now = time.monotonic()
            due_s = max(now, self._free_at_s)
            self._free_at_s = due_s + nbytes / self._bytes_per_s
        if due_s > self.until_s:
            raise OutOfTime(f"{store.url}: there is no time for all of it")
        store.rest(due_s - now)


def write_shards(
    store: Store,
    prefix: str,
    rank: int,
    pieces: Iterable[StatePiece],
    pace: RateLimit | None = None,
) -> tuple[dict[str, Any], ...]:
    """Writes a rank's pieces under ``prefix`` and returns their manifest entries, as dicts.

    Pieces are packed into objects of up to OBJECT_BYTES, larger ones are cut along their first
    axes, empty ones have no entry. ``pieces`` is consumed as the writing goes on, at most
    2 * THREADS objects ahead: a generator may copy from the device on the fly. The bytes must not
    change before this returns. Raises StoreFailed; what was written is then left to ``abandon``.
    """

    def write(numbered: tuple[int, list[StatePiece]]) -> list[dict[str, Any]]:
        number, parts = numbered
        file = f"r{rank}-{number}.bin"
        entries, offset = [], 0
        for tensor, box, dtype, view in parts:
            entries.append(ShardEntry(tensor, box, dtype, file, offset, view.nbytes, digest(view)))
            offset += view.nbytes
        if pace is not None:
            pace.wait(offset, store)
        store.put(f"{prefix}/{file}", [view for *_, view in parts])
        return [entry.to_dict() for entry in entries]

    written = parallel(write, enumerate(_pack(pieces)), THREADS)
    return tuple(entry for entries in written for entry in entries)


def _pack(pieces: Iterable[StatePiece]) -> Iterator[list[StatePiece]]:
    """Groups pieces, in order, into objects of at most OBJECT_BYTES."""
    cuts = (
        (tensor, cut, dtype, view)
        for tensor, box, dtype, data in pieces
        if box.numel
        for cut, view in _cut(box, memoryview(data).cast("B"))
    )
    return batched_by_size(cuts, lambda piece: piece[3].nbytes, OBJECT_BYTES)


def _cut(box: Box, view: memoryview) -> Iterator[tuple[Box, memoryview]]:
    """The box as boxes of at most OBJECT_BYTES, each contiguous in the bytes of the whole."""
    itemsize, offset = view.nbytes // box.numel, 0
    for part in slabs(box, OBJECT_BYTES // itemsize):
        nbytes = part.numel * itemsize
        yield part, view[offset : offset + nbytes]
        offset += nbytes


# ------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a tensor, and where its bytes go: writable, contiguous, row-major."""

    tensor: str
    box: Box
    out: memoryview


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries that lie together in one object and are read at once."""

    file: str
    start: int
    end: int
    entries: tuple[ShardEntry, ...]

    def part(self, data: memoryview, entry: ShardEntry) -> memoryview:
        return data[entry.offset - self.start :][: entry.nbytes]


_Placement = tuple[Want, Box]  # this part of an entry goes to that want


class Reader:
    """Reads any cut of a checkpoint's tensors, whatever cut wrote it. Verifies all it reads.

    ``url`` names the source in StateDamaged: the manifest's URL, as in CheckpointRef. May be used
    from several threads.
    """

    def __init__(self, store: Store, manifest: Manifest, url: str) -> None:
        self.manifest = manifest
        self.url = url
        self._store = store
        self._entries: dict[str, list[ShardEntry]] = defaultdict(list)
        for entry in manifest.entries:
            self._entries[entry.tensor].append(entry)

    def read(self, wants: Iterable[Want]) -> int:
        """Fills every want, reading each entry that it needs once. Returns bytes read.

        Raises StateDamaged if an object is missing, short, or differs from its digest, or an
        element is in no entry; StoreFailed if the store failed; ValueError if ``out`` has not the
        box's size. On an error the wants hold no state to be used.
        """
        placements: dict[ShardEntry, list[_Placement]] = defaultdict(list)
        for want in wants:
            for entry, part in self._sources(want):
                placements[entry].append((want, part))
        prefix = prefix_of(self.manifest)

        def fetch(run: _Run) -> int:
            data, flaws = _read_run(self._store, prefix, run, self.url)
            if flaws:
                raise StateDamaged(f"{self.url}: {flaws[0]}", self.url)
            for entry in run.entries:
                for want, part in placements[entry]:
                    _copy(entry, run.part(data, entry), want, part)
            return run.end - run.start

        return sum(parallel(fetch, _runs(placements), THREADS))

    def _sources(self, want: Want) -> list[tuple[ShardEntry, Box]]:
        """Entries and the disjoint parts of the want that each fills, all of it."""
        if want.tensor not in self.manifest.tensors:
            raise StateDamaged(f"{self.url}: has no tensor {want.tensor}", self.url)
        found: list[tuple[ShardEntry, Box]] = []
        missing = [want.box] if want.box.numel else []
        for entry in self._entries[want.tensor] if missing else ():
            parts = [p for old in missing if (p := old.intersect(entry.box)) is not None]
            if parts:
                _check_room(want, entry)
                found += [(entry, part) for part in parts]
                missing = [rest for old in missing for rest in old.minus(entry.box)]
        if missing:
            message = f"{self.url}: {want.tensor}: no entry has {missing[0]}"
            raise StateDamaged(message, self.url)
        return found


def odd_sizes(manifest: Manifest) -> Iterator[str]:
    """Entries whose length does not fit their box, or the other entries of the tensor."""
    itemsize: dict[str, int] = {}
    for entry in manifest.entries:
        numel = entry.box.numel
        fits = entry.nbytes % numel == 0 if numel else entry.nbytes == 0
        if not fits or (
            numel
            and itemsize.setdefault(entry.tensor, entry.nbytes // numel) * numel != entry.nbytes
        ):
            what = f"{entry.box} of {entry.dtype} has {entry.nbytes} bytes"
            yield printable(f"{entry.tensor}: {what}")


def verify(store: Store, manifest: Manifest) -> list[str]:
    """Reads every byte of a checkpoint and returns what is wrong with it; [] if nothing is."""
    prefix = prefix_of(manifest)

    def check(run: _Run) -> list[str]:
        try:
            return _read_run(store, prefix, run, store.url_of(prefix))[1]
        except (StateDamaged, StoreFailed) as error:
            return [str(error)]

    problems = parallel(check, _runs(manifest.entries), THREADS)
    return [*incomplete(manifest), *odd_sizes(manifest), *(p for each in problems for p in each)]


def first_flaw(store: Store, manifest: Manifest, pace: RateLimit | None = None) -> str:
    """Reads every byte of a checkpoint, THREADS objects at a time, until something is wrong with
    it: what. "" if nothing is. Raises StoreFailed where that can't be told."""
    prefix = prefix_of(manifest)
    url = store.url_of(prefix)

    def check(run: _Run) -> None:
        if pace is not None:
            pace.wait(run.end - run.start, store)
        if flaws := _read_run(store, prefix, run, url)[1]:
            raise StateDamaged(f"{url}: {flaws[0]}", url)

    try:
        parallel(check, _runs(manifest.entries), THREADS)
    except StateDamaged as error:
        return str(error)
    return ""


def writers(manifest: Manifest) -> int:
    """How many ranks have written shards of it."""
    return len({entry.file.partition("-")[0] for entry in manifest.entries})


def _runs(entries: Iterable[ShardEntry]) -> list[_Run]:
    """Neighbouring entries of one object, joined into reads of at most OBJECT_BYTES."""
    ordered = sorted((e for e in entries if e.nbytes), key=lambda e: (e.file, e.offset))
    runs: list[_Run] = []
    for file, group in groupby(ordered, key=lambda e: e.file):
        joined: list[ShardEntry] = []
        for entry in group:
            end = entry.offset + entry.nbytes
            if joined and (
                entry.offset != joined[-1].offset + joined[-1].nbytes
                or end - joined[0].offset > OBJECT_BYTES
            ):
                runs.append(_run(file, joined))
                joined = []
            joined.append(entry)
        runs.append(_run(file, joined))
    return runs


def _run(file: str, entries: Sequence[ShardEntry]) -> _Run:
    last = entries[-1]
    return _Run(file, entries[0].offset, last.offset + last.nbytes, tuple(entries))


def _read_run(store: Store, prefix: str, run: _Run, holder: str) -> tuple[memoryview, list[str]]:
    """The run's bytes, and what is wrong with them. Raises StateDamaged if there are none.

    Found damaged, they are read once more: it may have happened on the way.
    """
    data, flaws = memoryview(b""), [""]
    for _ in range(READS):
        try:
            data = store.read(f"{prefix}/{run.file}", run.start, run.end)
        except StoreError as error:
            if error.kind is FailureKind.MISSING:
                what, url = f"{holder}: {run.file} is missing", store.url_of(f"{prefix}/{run.file}")
                raise StateDamaged(what, holder, missing=url) from error
            raise
        if not (flaws := _flaws(run, data)):
            break
    return data, flaws


def _flaws(run: _Run, data: memoryview) -> list[str]:
    if len(data) != run.end - run.start:
        return [f"{run.file} ends at byte {run.start + len(data)}, expected {run.end} or more"]
    return [
        f"{entry.tensor} {entry.box} in {entry.file}: digest {found}, expected {entry.digest}"
        for entry in run.entries
        if (found := digest(run.part(data, entry))) != entry.digest
    ]


def _check_room(want: Want, entry: ShardEntry) -> None:
    expected = want.box.numel * (entry.nbytes // entry.box.numel)
    if want.out.nbytes != expected:
        raise ValueError(
            f"{want.tensor} {want.box} takes {expected} bytes, found room for {want.out.nbytes}"
        )


def _copy(entry: ShardEntry, data: memoryview, want: Want, part: Box) -> None:
    """Copies ``part``, in global coordinates, from an entry's bytes into the want's."""
    kind = _carrier(entry.nbytes // entry.box.numel)
    source = np.frombuffer(data, kind).reshape(entry.box.sizes)
    target = np.frombuffer(want.out, kind).reshape(want.box.sizes)
    target[part.slices_within(want.box)] = source[part.slices_within(entry.box)]


def _carrier(itemsize: int) -> np.dtype[Any]:
    """A numpy type of that width, to carry bytes of any torch type unchanged."""
    return np.dtype(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}")


# ------------------------------------------------------------------------------ transfers


def parallel(work: Callable[[A], R], items: Iterable[A], threads: int) -> list[R]:
    """``work`` on each item, results in order; items are taken at most 2 * threads ahead.

    The first error is raised once the work in flight has ended; what waits is dropped.
    """
    results: list[R] = []
    pending: deque[Future[R]] = deque()
    with _pool(threads) as pool:
        for item in items:
            if len(pending) >= 2 * threads:
                results.append(pending.popleft().result())
            pending.append(pool.submit(work, item))
        results += [future.result() for future in pending]
    return results


def batched_by_size(
    items: Iterable[A], size_of: Callable[[A], int], most: int
) -> Iterator[list[A]]:
    """In their order, ``most`` bytes at a time; a larger one is alone."""
    batch, room = list[A](), most
    for item in items:
        nbytes = size_of(item)
        if batch and nbytes > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= nbytes
    if batch:
        yield batch


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
