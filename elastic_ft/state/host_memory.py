"""Buffers of host memory for shards: the node keeper's, whose content outlives this process.

Where there is no keeper, or it has no room, they are this process's own. On a machine with a GPU
they are page-locked, which takes longer than any copy: what fits is used again, and so is what is
larger than a shard, as that of a smaller world was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from elastic_ft.core.assignment import Holding
from elastic_ft.core.commands import RecordStep
from elastic_ft.errors import one_line
from elastic_ft.keeper.buffer import Schema
from elastic_ft.keeper.keeper_client import KeeperClient, KeeperGone, KeeperRefused
from elastic_ft.keeper.protocol import Free, Sealed, Unseal
from elastic_ft.state.host_shards import Buffer
from elastic_ft.torch_private import pin, unpin

log = logging.getLogger(__name__)

FREE_BUFFERS_MAX = 4
LARGER_MAX = 2  # times a shard's size is the page-locked buffer that it may have


class HostMemory:
    """Thread-safe.

    Args:
        pinned: they are to be page-locked. What can't be is not: copies then take longer.
        unkept: is told that no keeper has this worker's snapshots, and why.

    Attributes:
        why: its buffers are this process's own.
    """

    def __init__(self, pinned: bool, unkept: Callable[[str], object]) -> None:
        self.pinned, self._unkept = pinned, unkept
        self.bytes_allocated = 0
        self.why = "it has no keeper"
        self._keeper: KeeperClient | None = None
        self._free: list[Buffer] = []
        self._told_of_locking = False
        self._lock = threading.Lock()

    def use(self, keeper: KeeperClient) -> None:
        """Buffers are the keeper's from now on."""
        with self._lock:
            before, self._keeper = self._keeper, keeper
            useless, self._free = self._free, []
        if before is not None:  # lost, perhaps stopped: nobody waits for it any more
            before.close()
        self.let_go(useless)

    def take(self, size: int, *, extra: bool = False) -> Buffer:
        """A buffer of ``size`` bytes.

        ``extra``: a keeper without room for this one may have room for the next.
        """
        with self._lock:
            fitting = [b for b in self._free if self._fits(b, size)]
            if fitting:
                found = min(fitting, key=lambda buffer: buffer.capacity.numel())
                self._free.remove(found)
                return found.first(size)
            useless, self._free = self._free, []  # another layout's sizes
        self.let_go(useless)
        buffer = self._kept(size, extra) or self._own(size)
        with self._lock:
            self.bytes_allocated += size
        return buffer

    def _fits(self, buffer: Buffer, size: int) -> bool:
        there = buffer.capacity.numel()
        return there == size or (self.pinned and size < there <= LARGER_MAX * size)

    def _kept(self, size: int, extra: bool) -> Buffer | None:
        """One that the node's keeper owns, or None if there is no keeper, or it has no room."""
        keeper = self._keeper
        if keeper is None:
            return None
        try:
            path, memory = keeper.allocate(size)
        except (KeeperGone, KeeperRefused, OSError) as error:
            if not (extra and isinstance(error, KeeperRefused)):
                self._leave(keeper, error)
            return None
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return Buffer(tensor, keeper, path, locked=self._page_locks(tensor))

    def _page_locks(self, memory: torch.Tensor) -> bool:
        try:
            if self.pinned:
                pin(memory)
        except RuntimeError as error:
            self._not_locked(error)
            return False
        return self.pinned

    def _own(self, size: int) -> Buffer:
        tensor = torch.zeros(size, dtype=torch.uint8)
        try:
            return Buffer(tensor.pin_memory() if self.pinned else tensor)
        except RuntimeError as error:
            self._not_locked(error)
            return Buffer(tensor)

    def _not_locked(self, error: RuntimeError) -> None:
        if not self._told_of_locking:
            said = "snapshots can't be page-locked, and copies from the GPU take longer: %s"
            log.warning(said, one_line(error))
        self._told_of_locking = True

    def give_back(self, buffers: Iterable[Buffer], sizes: set[int]) -> None:
        """They may be taken again. ``sizes``: in use; others are freed, if there are any."""
        with self._lock:
            free, self._free = [*self._free, *buffers], []
            for buffer in free:
                fits = not sizes or any(self._fits(buffer, size) for size in sizes)
                if fits and buffer.keeper is self._keeper and len(self._free) < FREE_BUFFERS_MAX:
                    self._free.append(buffer)
            useless = [b for b in free if b not in self._free]
        self.let_go(useless)

    def let_go(self, buffers: Iterable[Buffer]) -> None:
        """They are freed once nothing reads or writes them."""
        for buffer in buffers:
            with self._lock:
                self.bytes_allocated -= buffer.capacity.numel()
            if buffer.keeper is not None:
                if buffer.locked:
                    unpin(buffer.capacity)
                self.tell(buffer, Free(buffer.path))

    def tell_sealed(
        self,
        buffer: Buffer,
        holding: Holding,
        schema: Schema,
        record: tuple[RecordStep, ...] = (),
    ) -> bool:
        """As ``tell``, that ``buffer`` holds a shard. How it lies there is said where it is new."""
        laid = buffer.laid
        known = laid.told == schema
        told = self.tell(buffer, Sealed(buffer.path, holding, None if known else schema, record))
        laid.told = schema if told else None
        return told

    def tell(self, buffer: Buffer, message: Unseal | Sealed | Free) -> bool:
        """Whether the keeper whose memory it is has heard it. One that can't gives no more."""
        if buffer.keeper is None:
            return False
        try:
            buffer.keeper.tell(message)
        except KeeperGone as error:
            self._leave(buffer.keeper, error)
            return False
        return True

    def _leave(self, keeper: KeeperClient, error: Exception) -> None:
        with self._lock:
            if self._keeper is not keeper:
                return  # it was left before
            self._keeper = None
        if isinstance(error, KeeperGone):  # half a message may be on its way: nothing comes after
            keeper.close()
        self.why = str(error)
        self._unkept(self.why)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
