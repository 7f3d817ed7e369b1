"""Small states: written in shards, and read again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.storage.checkpoints import committed, load_manifest
from elastic_ft.storage.shards import Reader, Want, attempt_prefix, write_shards
from elastic_ft.storage.store import Store
from tests.storage.published import Done, commit

Arrays = dict[str, np.ndarray[Any, Any]]

# torch's names; numpy carries the bytes of bfloat16 as uint16
DTYPES = {"float32": "f4", "bfloat16": "u2", "int64": "i8", "bool": "?", "complex128": "c16"}
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.w": ("float32", (10, 6)),
    "model.conv": ("bfloat16", (4, 3, 2, 5)),
    "optim.step": ("int64", ()),
    "model.mask": ("bool", (7,)),
    "model.none": ("float32", (0, 4)),
    "model.wave": ("complex128", (3, 5)),
}


def some_state(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    state: Arrays = {}
    for name, (dtype, shape) in SHAPES.items():
        kind = np.dtype(DTYPES[dtype])
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
        state[name] = np.ascontiguousarray(raw).view(kind).reshape(shape)
    return state


def rows(array: np.ndarray[Any, Any], world: int, rank: int, axis: int = 0) -> Box:
    """The rank's slice of one axis, as FSDP cuts it; the first rank has scalars."""
    if not array.shape:
        return Box((), ())
    axis = min(axis, array.ndim - 1)
    size = array.shape[axis]
    each = -(-size // world)
    start, stop = min(rank * each, size), min((rank + 1) * each, size)
    offsets, sizes = [0] * array.ndim, list(array.shape)
    offsets[axis], sizes[axis] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


def cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array[box.slices_within(Box.whole(array.shape))])


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def pieces(
    state: Arrays, world: int, rank: int, axis: int = 0
) -> Iterator[tuple[str, Box, str, memoryview]]:
    for name, array in state.items():
        if array.shape or rank == 0:
            box = rows(array, world, rank, axis)
            yield name, box, SHAPES[name][0], raw(cut(array, box))


def write(
    store: Store, state: Arrays, step: int, world: int = 4, run: str = "run1", axis: int = 0
) -> Manifest:
    """All ranks' shards, and the manifest that would commit them."""
    prefix = attempt_prefix(run, 1, step)
    entries: list[dict[str, Any]] = []
    for rank in range(world):
        entries += write_shards(store, prefix, rank, pieces(state, world, rank, axis))
    return Manifest(
        job="job",
        run=run,
        step=step,
        generation=1,
        nonce=uuid4().hex,
        layout=f"fsdp {world}",
        created_at_s=1.5,
        tensors={name: TensorSpec(dtype, shape) for name, (dtype, shape) in SHAPES.items()},
        entries=tuple(ShardEntry.from_dict(entry) for entry in entries),
        extra={"position": step},
    )


def save(store: Store, step: int, keep_last: int = 10, run: str = "run1") -> Done:
    return commit(store, write(store, some_state(step), step, run=run), keep_last)


def steps(store: Store) -> list[int]:
    return [ref.step for ref in committed(store)]


def read_cut(reader: Reader, world: int, axis: int) -> list[Arrays]:
    """Every rank's boxes of another cut, read together."""
    found = []
    for rank in range(world):
        arrays: Arrays = {}
        wants = []
        for name, (dtype, shape) in SHAPES.items():
            box = rows(np.empty(shape, DTYPES[dtype]), world, rank, axis)
            arrays[name] = np.zeros(box.sizes, DTYPES[dtype])
            wants.append(Want(name, box, raw(arrays[name])))
        reader.read(wants)
        found.append(arrays)
    return found


class Counting:
    """Passes everything on to a backend, and notes each call."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return getattr(self.backend, name)(*args)

        return call


def flip(store: Store, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.put(key, data)


def read_all(store: Store, ref: CheckpointRef) -> None:
    reader = Reader(store, load_manifest(store, ref), ref.url)
    read_cut(reader, 1, 0)
