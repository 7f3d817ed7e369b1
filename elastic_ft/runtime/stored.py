"""A checkpoint as one more holder of its step, for the shards that no memory has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from elastic_ft.core.events import CheckpointRef, Source
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateUnreadable, StoreFailed
from elastic_ft.runtime.buffer import DIGEST_BYTES, Schema, Slot, seal
from elastic_ft.storage import checkpoints


class StoredState:
    """Serves boxes as ``keeper.LeftShard`` does. Raises StateDamaged, naming the URL, on any doubt;
    StateUnreadable where the store can't be read.

    It has every tensor whole, and is asked for what nobody else has.
    """

    is_far = True

    def __init__(self, source: Source, deadline_s: float = 60.0) -> None:
        self.holder = source.url
        try:
            ref = CheckpointRef(source.step, source.url)
            self._reader = checkpoints.open_checkpoint(ref, deadline_s)
        except StoreFailed as error:
            raise StateUnreadable(str(error), source.url) from error
        tensors = self._reader.manifest.tensors.items()
        self.schema: Schema = tuple(
            Slot(name, spec.dtype, tuple(spec.shape), Box.whole(spec.shape), 0, 0)
            for name, spec in tensors
        )
        entries = [entry for entry in self._reader.manifest.entries if entry.box.numel]
        self._itemsizes = {entry.tensor: entry.nbytes // entry.box.numel for entry in entries}

    def read(self, parts: Iterable[tuple[str, Box]]) -> bytes:
        """The bytes of ``parts``, one after the other, then DIGEST_BYTES of their digest."""
        wanted = list(parts)
        sizes = [box.numel * self._itemsizes[name] for name, box in wanted]
        buffer = np.zeros(sum(sizes) + DIGEST_BYTES, np.uint8)
        wants, offset = [], 0
        for (name, box), size in zip(wanted, sizes, strict=True):
            into = memoryview(buffer[offset : offset + size])
            wants.append(checkpoints.Want(name, box, into))
            offset += size
        try:
            self._reader.read(wants)
        except StoreFailed as error:
            raise StateUnreadable(str(error), self.holder) from error
        seal(buffer)
        return buffer.tobytes()
