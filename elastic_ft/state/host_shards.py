"""One shard of the training state in host memory, and what a buffer for it is."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from elastic_ft.core.assignment import Holding
from elastic_ft.errors import StateDamaged
from elastic_ft.keeper.buffer import ByteArray, Schema, Slot, is_whole, label, schema_of_parts, seal
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.state.tensors import LocalState, StateTensor, keyed, tensor_name


def make_schema(state: LocalState) -> Schema:
    return schema_of_parts(
        (tensor_name(key), tensor.dtype, tensor.shape, tensor.box, tensor.local.element_size())
        for key, tensor in sorted(state.items())
    )


@dataclass(eq=False, slots=True)
class LaidIn:
    """How the last shard lay in a buffer: the next one mostly lies there alike.

    Attributes:
        parts: its tensors, in the order of ``schema``.
        told: the schema that the buffer's keeper knows.
    """

    schema: Schema | None = None
    parts: list[torch.Tensor] = field(default_factory=list)
    told: Schema | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """Host memory for one shard, its digest included.

    Attributes:
        memory: uint8 [schema_bytes + DIGEST_BYTES].
        keeper: whose memory it is; None: this process's own.
        path: under which the keeper knows it.
        whole: all of the buffer, if ``memory`` is but its beginning.
        locked: the keeper's memory is page-locked by this process.
    """

    memory: torch.Tensor
    keeper: KeeperClient | None = None
    path: str = ""
    whole: torch.Tensor | None = None
    locked: bool = False
    laid: LaidIn = field(default_factory=LaidIn)

    @property
    def capacity(self) -> torch.Tensor:
        return self.memory if self.whole is None else self.whole

    def first(self, size: int) -> Buffer:
        """The same, for a shard of ``size`` bytes."""
        whole = self.capacity
        return replace(self, memory=whole[:size], whole=whole)

    @property
    def bytes(self) -> ByteArray:
        return self.memory.numpy()


@dataclass(eq=False, slots=True)
class HostShard:
    """One shard of the state after one step, in host memory: empty until it is filled.

    ``moved_out``: it was the live shard, which has left its device. As that it has no digest.
    """

    of: Holding
    run: str  # of the controller: sealed with it
    moved_out: bool = False
    users: int = 0  # uploads that still read it
    recycled: bool = False  # its buffer is another's
    ready: Future[None] = field(default_factory=Future)
    schema: Schema = ()
    buffer: Buffer = field(default_factory=lambda: Buffer(torch.empty(0, dtype=torch.uint8)))

    def fill(self, schema: Schema, buffer: Buffer) -> HostShard:
        self.schema, self.buffer = schema, buffer
        return self

    def verify(self, holder: str) -> None:
        """Raises StateDamaged when the bytes are not those that were sealed."""
        if not self.is_whole():
            of = self.of
            raise StateDamaged(
                f"{of.tier} copy of shard {of.shard} at step {of.step} in {holder}: digest differs",
                holder,
                of.shard,
            )

    def is_whole(self) -> bool:
        return self.moved_out or is_whole(self.buffer.bytes, self.label())

    def seal(self) -> None:
        seal(self.buffer.bytes, self.label())

    def label(self) -> bytes:
        return label(self.run, self.of, self.schema)

    def state(self) -> LocalState:
        """The tensors, aliasing the buffer."""
        return keyed((slot.name, self._tensor(slot)) for slot in self.schema)

    def parts(self) -> list[torch.Tensor]:
        """The tensors alone, in the order of the schema. Made once for shards that lie alike."""
        laid = self.buffer.laid
        if laid.schema != self.schema:
            laid.schema, laid.parts = self.schema, [self._part(slot) for slot in self.schema]
        self.schema = laid.schema  # the same object is compared at once
        return laid.parts

    def _tensor(self, slot: Slot) -> StateTensor:
        return StateTensor(slot.shape, slot.box, self._part(slot))

    def _part(self, slot: Slot) -> torch.Tensor:
        raw = self.buffer.memory[slot.offset : slot.offset + slot.nbytes]
        return raw.view(getattr(torch, slot.dtype)).view(slot.box.sizes)


@dataclass(frozen=True, eq=False, slots=True)
class KeptShard:
    """The live shard of a generation that is over, as it was: no copy, no digest."""

    of: Holding
    tensors: LocalState
    users: int = 0

    def verify(self, holder: str) -> None:
        """Live memory has no digest."""

    def state(self) -> LocalState:
        return self.tensors
