"""Hugging Face safetensors folders: written from a checkpoint, read by ranges.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
data_offsets behind the header), and the tensors' bytes, row-major, without gaps. A folder has one
``model.safetensors``, or several files and ``model.safetensors.index.json``, which says which
tensor is where. Plain bytes: no torch, no copies, any of torch's types that the format knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from elastic_ft.core.manifest import COUNT_MAX, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import MALFORMED, StorageError, StoreFailed, one_line, printable
from elastic_ft.storage.shards import OBJECT_BYTES, THREADS, Reader, Want, batched_by_size, parallel
from elastic_ft.storage.store import Store, if_there, open_store

CONFIG = "config.json"
MODEL = "model."  # begins the names of its tensors in a checkpoint
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 2**30  # of an exported file; one is in memory at a time
HEADER_BYTES_MAX = 100 * 2**20  # as the reference implementation has it

# What untrusted JSON makes of code that expects another shape of it.

# torch's name -> the format's, bytes per element
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
_NAMES = {theirs: (name, itemsize) for name, (theirs, itemsize) in DTYPES.items()}


# ------------------------------------------------------------------------------- writing


def export_folder(reader: Reader, store: Store, file_bytes: int = FILE_BYTES) -> int:
    """Writes the model's tensors as a folder, by its own names. Returns their bytes.

    ``model-00001-of-0000N.safetensors`` and so on, then the index. Raises StorageError for a dtype
    that safetensors does not have, StateDamaged, StoreFailed.
    """
    specs = {
        name.removeprefix(MODEL): spec
        for name, spec in reader.manifest.tensors.items()
        if name.startswith(MODEL)
    }
    for name, spec in specs.items():
        if spec.dtype not in DTYPES:
            raise StorageError(f"{name}: safetensors has no {spec.dtype}")
    files = list(batched_by_size(specs, lambda name: _nbytes(specs[name]), file_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        key = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # Wide types first: then each tensor is aligned for its type.
        names.sort(key=lambda name: -DTYPES[specs[name].dtype][1])
        _write(reader, store, key, {name: (MODEL + name, specs[name]) for name in names})
        weight_map |= dict.fromkeys(names, key)
    total = sum(map(_nbytes, specs.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    store.put(INDEX, json.dumps(index, indent=2).encode())
    return total


def export_file(reader: Reader, store: Store, key: str, names: Mapping[str, str]) -> int:
    """Writes the tensors ``names`` of a checkpoint as one file, where each has the name that is
    given for it. Returns their bytes. Raises StateDamaged, StoreFailed."""
    chosen = {called: (name, reader.manifest.tensors[name]) for name, called in names.items()}
    _write(reader, store, key, chosen)
    return sum(_nbytes(spec) for _, spec in chosen.values())


def _write(
    reader: Reader, store: Store, key: str, chosen: Mapping[str, tuple[str, TensorSpec]]
) -> None:
    """One file. ``chosen``: by the name in it, the name in the checkpoint and what it is."""
    held = {called: bytearray(_nbytes(spec)) for called, (_, spec) in chosen.items()}
    reader.read(
        Want(name, Box.whole(spec.shape), memoryview(held[called]))
        for called, (name, spec) in chosen.items()
    )
    header = _header({called: spec for called, (_, spec) in chosen.items()})
    store.put(key, [header, *held.values()])


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPES[spec.dtype][1]


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Length and header, padded so that what follows is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        stop = offset + _nbytes(spec)
        dtype, shape = DTYPES[spec.dtype][0], list(spec.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: bytes [start, stop) of a file, row-major."""

    file: str
    spec: TensorSpec
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        """Of one index of dimension 0; of a scalar, all."""
        rows = self.spec.shape[0] if self.spec.shape else 1
        return (self.stop - self.start) // rows if rows else 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Part [start, stop) of a tensor's dimension 0. A scalar has one row."""

    tensor: str
    start: int
    stop: int


class SafetensorsFolder:
    """The tensors of a safetensors folder, or of one file. Reads just the bytes it is asked for."""

    def __init__(self, store: Store, tensors: Mapping[str, Stored]) -> None:
        self.store = store
        self.tensors = tensors

    @property
    def url(self) -> str:
        return self.store.url

    def config(self) -> dict[str, Any]:
        """The model's configuration beside the tensors; {} if there is none. Raises StoreFailed."""
        content = if_there(lambda: self.store.get(CONFIG))
        try:
            found = json.loads(bytes(content)) if content is not None else {}
        except (ValueError, RecursionError):  # it is no part of the weights
            return {}
        return found if isinstance(found, dict) else {}

    def read(self, wants: Iterable[Rows], use: Callable[[Rows, memoryview], None]) -> int:
        """Calls ``use`` with the bytes of the wanted rows, at most OBJECT_BYTES of them at a time,
        from several threads. Returns bytes read. Raises StoreFailed."""
        parts = sorted(part for want in wants for part in self._parts(want))

        def fetch(run: list[_Part]) -> int:
            file, start, stop = run[0].file, run[0].start, run[-1].stop
            data = memoryview(self.store.get(file, start, stop))
            if len(data) != stop - start:
                url = self.store.url_of(file)
                raise StoreFailed(f"{url} ends at byte {start + len(data)}, expected {stop}")
            for part in run:
                use(part.rows, data[part.start - start : part.stop - start])
            return stop - start

        return sum(parallel(fetch, _runs(parts), THREADS))

    def _parts(self, want: Rows) -> Iterator[_Part]:
        """The wanted rows, so many at a time as OBJECT_BYTES holds; none of an empty tensor."""
        stored = self.tensors[want.tensor]
        size = stored.row_bytes
        if not size:
            return
        step = max(1, OBJECT_BYTES // size)
        for first in range(want.start, want.stop, step):
            last = min(first + step, want.stop)
            start, stop = stored.start + first * size, stored.start + last * size
            yield _Part(stored.file, start, stop, Rows(want.tensor, first, last))


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """Bytes [start, stop) of a file, and the rows that they are."""

    file: str
    start: int
    stop: int
    rows: Rows = field(compare=False)


def _runs(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Neighbours in a file joined into reads of at most OBJECT_BYTES; no gap is read."""
    run: list[_Part] = []
    for part in parts:
        if run and (
            part.file != run[-1].file
            or part.start != run[-1].stop
            or part.stop - run[0].start > OBJECT_BYTES
        ):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def open_folder(url: str) -> SafetensorsFolder:
    """The folder at a URL, or the one file that it names. Reads headers only.

    Raises StorageError, one line, if it is missing or not such a folder; StoreFailed.
    """
    root, file = root_and_file(url)
    return folder_of(open_store(root), file)


def root_and_file(url: str) -> tuple[str, str]:
    """Of a folder's URL, or of that of the one file in it; "": none in particular."""
    root, _, file = url.rpartition("/") if url.endswith(".safetensors") else (url, "", "")
    return root or ".", file


def folder_of(store: Store, name: str = "") -> SafetensorsFolder:
    """As ``open_folder``, of a store; ``name``: of its one file."""
    files = [name] if name else _files(store)
    tensors: dict[str, Stored] = {}
    for found in parallel(lambda file: _read_header(store, file), files, THREADS):
        tensors |= found
    return SafetensorsFolder(store, tensors)


def _files(store: Store) -> list[str]:
    index = if_there(lambda: store.get(INDEX))
    if index is None:
        return [SINGLE]
    try:
        files = sorted(set(json.loads(bytes(index))["weight_map"].values()))
        for file in files:
            if not file.isprintable() or {"", ".", ".."} & {*file.split("/")} or "\\" in file:
                raise ValueError(f"not the name of a file of this folder: {file[:80]!r}")
    except MALFORMED as error:
        raise StorageError(
            f"{store.url_of(INDEX)}: not an index: {printable(one_line(error))}"
        ) from None
    return files


def _read_header(store: Store, file: str) -> dict[str, Stored]:
    size = if_there(lambda: store.size(file))
    if size is None:
        what = f"neither {INDEX} nor {SINGLE} is there" if file == SINGLE else f"no {file} there"
        raise StorageError(f"{store.url}: {what}")
    length = int.from_bytes(bytes(store.get(file, 0, 8)), "little")
    if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
        raise StorageError(f"{store.url_of(file)}: not a safetensors file, or cut short")
    try:
        entries = json.loads(bytes(store.get(file, 8, 8 + length)))
        entries.pop("__metadata__", None)
        found = {name: _stored(file, entry, 8 + length) for name, entry in entries.items()}
    except MALFORMED as error:
        why = printable(one_line(error))
        raise StorageError(f"{store.url_of(file)}: not a safetensors header: {why}") from None
    end = max((stored.stop for stored in found.values()), default=8 + length)
    if end != size:
        raise StorageError(f"{store.url_of(file)} has {size} bytes, its header says {end}")
    return found


def _stored(file: str, entry: Mapping[str, Any], base: int) -> Stored:
    dtype, itemsize = _NAMES.get(entry["dtype"], (entry["dtype"], 0))
    if not isinstance(dtype, str):
        raise TypeError("a dtype that is no text")
    spec = TensorSpec(dtype, tuple(map(_count, entry["shape"])))
    start, stop = (base + _count(offset) for offset in entry["data_offsets"])
    if stop < start or (itemsize and stop - start != prod(spec.shape) * itemsize):
        raise ValueError(f"{spec} in {stop - start} bytes")
    return Stored(file, spec, start, stop)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= COUNT_MAX:
        raise ValueError(f"expected a whole number from 0, found {str(value)[:40]}")
    return value
