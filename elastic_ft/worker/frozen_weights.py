"""Frozen weights of a job's model as a generation begins: from peers' memory, or from their folder.

No snapshot has them. So what no participant holds is read from the folder, whose digest is looked
at first; while that can't be had the job is suspended, and tries again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from elastic_ft.core.sharding import Box
from elastic_ft.engines.by_reference import InFolder, Reference
from elastic_ft.errors import ModelError, StateUnreadable, StorageError
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import DIGEST_BYTES, Schema, Slot, seal
from elastic_ft.state.checkpoint_source import reading_checkpoint
from elastic_ft.state.outcomes import together
from elastic_ft.state.placed import Placed, tell_shards
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.state.transfer import move
from elastic_ft.storage.cancellable import CancellableStore

NAME = "frozen"  # of what is exchanged for them


@dataclass(frozen=True, slots=True)
class FrozenBytes:
    """That one worker got, from whom."""

    from_peers: int = 0
    from_folder: int = 0

    @property
    def any(self) -> bool:
        return self.from_peers + self.from_folder > 0

    def in_words(self) -> str:
        return (
            f"frozen weights: {self.from_peers:,} bytes from peers, {self.from_folder:,} from the "
            "folder"
        )


def place_frozen(reference: Reference | None, groups: Groups, silent_s: float) -> FrozenBytes:
    """Fills what is laid out of them, if there are any; all participants call it.

    ``silent_s``: after so long without a byte from the store, it can't be read. Raises GroupBroken;
    StateUnreadable of the generation's source where what none has can't be read: all do.
    """
    if reference is None:
        return FrozenBytes()
    shards = {reference.shard: reference.held} if reference.held else {}
    told = tell_shards(groups, NAME, reference.space, shards, reference.targets)
    placed, offers = told.placed(), list(shards.values())
    folder = Folder(reference, groups, placed, silent_s)
    received = 0
    if placed.offered and placed.needed:
        received = move(groups, placed, offers, reference.targets, [folder], f"{NAME}/fetched")
        received -= folder.given
    elif placed.needed:
        together(groups, f"{NAME}/read", folder.fill)
    if groups.rank is not None:
        reference.filled()
    return FrozenBytes(received, folder.read_bytes)


class Folder:
    """Serves boxes of what no participant has, as keepers do of the dead's. Every tensor is there.

    Attributes:
        read_bytes: of the store.
        given: the bytes that ``read`` has returned.
    """

    is_far = True

    def __init__(
        self, reference: Reference, groups: Groups, placed: Placed, silent_s: float
    ) -> None:
        self.holder = groups.assignment.source.url
        self._reference, self._groups, self._silent_s = reference, groups, silent_s
        listings = {id(part.listing): part.listing for part in placed.ranks.values()}
        kinds = {
            name: listing.kinds[kind]
            for listing in listings.values()
            for name, kind in listing.tensors
        }
        self.schema: Schema = tuple(
            Slot(name, kind.dtype, kind.shape, Box.whole(kind.shape), 0, 0)
            for name, kind in sorted(kinds.items())
        )
        self._kinds = kinds
        self._found: InFolder | None = None
        self.read_bytes = self.given = 0

    def fill(self) -> tuple[None, tuple[str, ...]]:
        """Of this rank all that is laid out, where nobody has any of it."""
        if not self._reference.targets:
            return None, ()
        self._read([self._reference.targets])
        return None, (self.holder,)

    def read(self, parts: Iterable[tuple[str, Box]]) -> bytes:
        """The bytes of ``parts``, one after the other, then DIGEST_BYTES of their digest."""
        tensors, rounds = [], list[dict[str, StateTensor]]()
        for name, box in parts:
            kind = self._kinds[name]
            local = torch.empty(box.sizes, dtype=getattr(torch, kind.dtype))
            tensors.append(local)
            free = next((some for some in rounds if name not in some), None)
            if free is None:
                rounds.append(free := {})
            free[name] = StateTensor(kind.shape, box, local)
        self._read(rounds)
        raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        buffer = torch.cat([*raw, torch.zeros(DIGEST_BYTES, dtype=torch.uint8)]).numpy()
        seal(buffer)
        self.given += buffer.nbytes
        return buffer.tobytes()

    def _read(self, parts: Iterable[LocalState]) -> None:
        reference, groups = self._reference, self._groups
        store = CancellableStore(reference.url, self._silent_s, groups.received)
        with reading_checkpoint(groups, store, self.holder):
            try:
                self._found = self._found or reference.find(store)
                for some in parts:
                    self.read_bytes += reference.read(store, self._found, some)
            except (ModelError, StorageError) as error:  # not there, or others: not this worker's
                raise StateUnreadable(str(error), self.holder) from error
