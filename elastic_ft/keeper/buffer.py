"""How one shard of the state lies in a buffer of host memory. No torch: a node's keeper reads it.

The buffer holds the tensors' parts one after the other, each aligned, and ends with the digest
(xxh3_128) of all before it and of a label: which shard of which state that is. So a shard can be
verified wherever it is, in its worker's memory, in its node's keeper, in a peer's: whole bytes of
another step are no more taken for it than damaged ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_ft.core.assignment import Holding
from elastic_ft.core.sharding import Box

ALIGNMENT = 64  # bytes
DIGEST_BYTES = 16  # at the end of a shard's buffer

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor's part lies in a shard's buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    nbytes: int


Schema = tuple[Slot, ...]


def schema_of_parts(parts: Iterable[tuple[str, str, tuple[int, ...], Box, int]]) -> Schema:
    """The schema of a buffer for ``parts``: name, dtype, whole shape, box, bytes per element."""
    slots, offset = [], 0
    for name, dtype, shape, box, itemsize in parts:
        nbytes = box.numel * itemsize
        slots.append(Slot(name, dtype, shape, box, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots)


def schema_bytes(schema: Schema) -> int:
    """Size of a shard's buffer without the digest."""
    if not schema:
        return 0
    return schema[-1].offset + -(-schema[-1].nbytes // ALIGNMENT) * ALIGNMENT


def shard_bytes(schema: Schema) -> int:
    """Size of a shard in its buffer, which may be larger."""
    return schema_bytes(schema) + DIGEST_BYTES


def label(run: str, held: Holding, schema: Schema) -> bytes:
    """What is sealed with a shard: of which state it is, of which run, and how it lies there.

    Not where it is held: a peer's copy has the same.
    """
    slots = [
        [slot.name, slot.dtype, slot.shape, slot.box.offsets, slot.box.sizes, slot.offset]
        for slot in schema
    ]
    which = [run, held.step, held.generation, held.space, held.shard, slots]
    return json.dumps(which).encode()


def seal(buffer: ByteArray, label: bytes = b"") -> None:
    """Writes the digest of what is in ``buffer``, as ``label``; none for parts on their way."""
    buffer[-DIGEST_BYTES:] = np.frombuffer(buffer_digest(buffer[:-DIGEST_BYTES], label), np.uint8)


def is_whole(buffer: ByteArray, label: bytes = b"") -> bool:
    """Whether the bytes are those that were sealed, and sealed as ``label``."""
    return buffer_digest(buffer[:-DIGEST_BYTES], label) == buffer[-DIGEST_BYTES:].tobytes()


def buffer_digest(data: ByteArray, label: bytes = b"") -> bytes:
    digest = xxhash.xxh3_128(memoryview(data))
    digest.update(label)
    return digest.digest()


def bytes_of_box(buffer: ByteArray, slot: Slot, box: Box) -> ByteArray:
    """The bytes of ``box`` (global coordinates, inside the slot's), row-major; uncopied if whole.

    Elements are carried as opaque bytes: numpy has no type for some of torch's.
    """
    raw = buffer[slot.offset : slot.offset + slot.nbytes]
    if box == slot.box or not slot.nbytes:
        return raw
    itemsize = slot.nbytes // slot.box.numel
    shaped = raw.reshape(*slot.box.sizes, itemsize)
    return np.ascontiguousarray(shaped[box.slices_within(slot.box)]).reshape(-1)
