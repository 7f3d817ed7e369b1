"""A checkpoint as one more holder of its step, for the shards that no memory has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from elastic_ft.core.assignment import CheckpointRef, Source
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateUnreadable, StoreFailed
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import DIGEST_BYTES, Schema, Slot, seal
from elastic_ft.storage import checkpoints, shards
from elastic_ft.storage.cancellable import CancellableStore


@contextmanager
def reading_checkpoint(groups: Groups, store: CancellableStore, url: str) -> Iterator[None]:
    """Reads of the checkpoint ``url`` end when ``groups`` are aborted: GroupBroken.

    Raises StateUnreadable where the store can't be read.
    """
    with groups.guard(store):
        try:
            yield
        except StoreFailed as error:
            raise StateUnreadable(str(error), url) from error


def store_of(groups: Groups, ref: CheckpointRef, silent_s: float) -> CancellableStore:
    """The store of a checkpoint, where no wait for a byte takes longer than ``silent_s``."""
    return CancellableStore(checkpoints.root_of(ref), silent_s, groups.received)


class StoredState:
    """Serves boxes as ``keeper.LeftShard`` does. Raises StateDamaged, naming the URL, on any doubt;
    StateUnreadable where the store can't be read; GroupBroken once ``groups`` are aborted.

    It has every tensor whole, and is asked for what nobody else has.
    """

    is_far = True

    def __init__(self, groups: Groups, source: Source, silent_s: float) -> None:
        self.holder, self._groups = source.url, groups
        ref = CheckpointRef(source.step, source.url)
        self._store = store_of(groups, ref, silent_s)
        with reading_checkpoint(groups, self._store, source.url):
            self._reader = checkpoints.open_checkpoint(ref, self._store)
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
            wants.append(shards.Want(name, box, into))
            offset += size
        with reading_checkpoint(self._groups, self._store, self.holder):
            self._reader.read(wants)
        seal(buffer)
        return buffer.tobytes()
