"""Snapshots in host memory: this rank's shard and copies kept for peers.

A snapshot of step s is copied, and sent to its buddy, while the forward and backward of step s+1
run; both must be complete before the optimizer of s+1. As every rank waits for that before the
all-reduce that precedes the optimizer, passing it means: step s is held everywhere, and anything
older may go. So two buffers per shard suffice, and a third while one is being uploaded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from elastic_ft.core.events import Holding, RecordStep, Source, Tier
from elastic_ft.errors import GroupBroken, StateDamaged
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import (
    DIGEST_BYTES,
    Bytes,
    Schema,
    Slot,
    is_whole,
    label,
    lay_out,
    schema_bytes,
    seal,
)
from elastic_ft.keeper.client import KeeperClient, KeeperGone, KeeperRefused
from elastic_ft.keeper.keeper import RECORD_STEPS
from elastic_ft.keeper.protocol import Free, Sealed, Unseal
from elastic_ft.state.tensors import LocalState, StateTensor, keyed, tensor_name
from elastic_ft.torch_private import pin, unpin

FREE_BUFFERS_MAX = 4
TIERS = (Tier.HOST, Tier.PEER)  # own before peer's


def make_schema(state: LocalState) -> Schema:
    return lay_out(
        (tensor_name(key), tensor.dtype, tensor.shape, tensor.box, tensor.local.element_size())
        for key, tensor in sorted(state.items())
    )


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """Host memory for one shard, its digest included."""

    memory: torch.Tensor  # uint8 [schema_bytes + DIGEST_BYTES]
    keeper: KeeperClient | None = None  # whose memory it is; None: this process's own
    path: str = ""  # under which the keeper knows it

    @property
    def bytes(self) -> Bytes:
        return self.memory.numpy()


@dataclass(eq=False, slots=True)
class HostShard:
    """One shard of the state after one step, in host memory: empty until it is filled."""

    of: Holding
    run: str  # of the controller: sealed with it
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
        if not is_whole(self.buffer.bytes, self.label()):
            of = self.of
            raise StateDamaged(
                f"{of.tier} copy of shard {of.shard} at step {of.step} in {holder}: digest differs",
                holder,
                of.shard,
            )

    def seal(self) -> None:
        """It is complete."""
        seal(self.buffer.bytes, self.label())

    def label(self) -> bytes:
        return label(self.run, self.of, self.schema)

    def state(self) -> LocalState:
        """The tensors, aliasing the buffer."""
        return keyed((slot.name, self._tensor(slot)) for slot in self.schema)

    def _tensor(self, slot: Slot) -> StateTensor:
        raw = self.buffer.memory[slot.offset : slot.offset + slot.nbytes]
        local = raw.view(getattr(torch, slot.dtype)).view(slot.box.sizes)
        return StateTensor(slot.shape, slot.box, local)


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


class Snapshots:
    """The snapshots of one worker, over all generations.

    Args:
        unkept: is told that no keeper has this worker's snapshots, and why.
        run: the controller's start that it works for.
    """

    def __init__(
        self,
        worker: str,
        pinned: bool,
        unkept: Callable[[str], object],
        run: str = "",
    ) -> None:
        self.worker, self._unkept, self._run = worker, unkept, run
        self._pinned = pinned
        self._held: list[HostShard | KeptShard] = []
        self._record: deque[RecordStep] = deque(maxlen=RECORD_STEPS)
        self._free: list[Buffer] = []
        self._keeper: KeeperClient | None = None
        self._why = "it has no keeper"  # that its snapshots are its own
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running: Future[None] | None = None
        self._late: Future[None] | None = None  # a copy of an epoch before that has not ended
        self._epoch = 0  # a copy of an epoch before is of no use, however it ends
        self.bytes_allocated = 0
        self._cost_s = 0.0

    # ------------------------------------------------------------------ taking

    def take(
        self,
        step: int,
        state: LocalState,
        groups: Groups,
        peer_schemas: dict[int, Schema],
        reach: Reach,
        on_held: Callable[[int], None] | None = None,
        partial: bool = False,
    ) -> HostShard:
        """Starts copying ``state`` and, when ``on_held`` is given, the exchange with buddies.

        All of it happens on a thread of its own: training waits in ``wait`` alone.
        ``partial``: ``state`` is a part of the shard, for an upload alone; ``release`` frees it.
        ``peer_schemas``: of the ranks whose copies this one keeps. ``on_held(step)`` is called
        once own copy, sent copy and received copies are complete; where every rank has all of the
        state, a keeper must have the copy.
        """
        assert self._running is None, "one snapshot at a time: wait() comes before take()"
        assert groups.rank is not None
        began = time.perf_counter()
        of = groups.assignment.holding_of(groups.rank, step, Tier.HOST)
        shard = HostShard(of, self._run)
        source = _Source(state)
        exchange = _Exchange(step, groups, peer_schemas) if on_held else None
        epoch = self._epoch

        def copy() -> None:
            reach("snapshot_copy", step)
            schema = make_schema(source.state)
            shard.fill(schema, self._buffer(schema))
            source.copy_to(shard)
            shard.seal()

        def run() -> None:
            cpu_began = time.thread_time()
            try:
                copy()
                kept = self._keep_if_due([] if partial else [shard], epoch)
            except BaseException as error:
                self._recycle([shard])
                shard.ready.set_exception(error)  # an upload waits for it
                raise
            shard.ready.set_result(None)
            if exchange is not None and on_held is not None:
                reach("buddy_send", step)
                self._exchange(shard, exchange, epoch)
                if kept or groups.assignment.is_cut:
                    on_held(step)
                else:
                    self._unkept(self._why)
            if not self._pinned:  # it takes processor time from training, not only bandwidth
                self._cost_s += time.thread_time() - cpu_began

        self._running = self._thread.submit(run)
        self._cost_s += time.perf_counter() - began
        return shard

    def take_cost_s(self) -> float:
        """Seconds by which snapshots have delayed training since this was last asked."""
        cost_s, self._cost_s = self._cost_s, 0.0
        return cost_s

    def _exchange(self, own: HostShard, exchange: _Exchange, epoch: int) -> None:
        incoming = []
        for rank, schema in sorted(exchange.peer_schemas.items()):
            of = exchange.groups.assignment.holding_of(rank, own.of.step, Tier.PEER)
            shard = HostShard(of, self._run)
            incoming.append((rank, shard.fill(schema, self._buffer(schema))))
        try:
            exchange.run(own.buffer.memory, [(rank, s.buffer.memory) for rank, s in incoming])
            for _, shard in incoming:
                shard.verify(f"rank {exchange.groups.rank}")
            self._keep_if_due([shard for _, shard in incoming], epoch)
        except BaseException:
            # A transfer may still write: they are not used again, and freed once it lets go.
            self._let_go(shard.buffer for _, shard in incoming)
            raise

    def _keep_if_due(self, shards: list[HostShard], epoch: int) -> bool:
        """They are complete: sources for others from now on. Returns whether a keeper has them.

        Raises GroupBroken if their generation was left meanwhile: what they are copies of may have
        been overwritten since, and nobody has been told of them.
        """
        self._check(epoch)
        kept = True
        for shard in shards:
            holding = replace(shard.of, tier=Tier.KEEPER)
            record = self._take_record(holding.step) if shard.buffer.keeper else ()
            sealed = Sealed(shard.buffer.path, holding, shard.schema, record)
            kept = self._tell(shard.buffer, sealed) and kept
        with self._lock:
            self._check(epoch)
            self._held += shards
        return kept

    def _tell(self, buffer: Buffer, message: Unseal | Sealed | Free) -> bool:
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
        self._why = str(error)
        self._unkept(self._why)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise GroupBroken("a snapshot was complete only after its generation had been left")

    def wait(self, deadline_s: float) -> None:
        """Waits for the snapshot under way, until ``deadline_s`` on the monotonic clock.

        Raises GroupBroken if it failed or is late.
        """
        running, self._running = self._running, None
        if running is None:
            return
        began = time.perf_counter()
        try:
            running.result(max(0.001, deadline_s - time.monotonic()))
        except FutureTimeout:
            raise GroupBroken("a snapshot was not complete in time") from None
        finally:
            self._cost_s += time.perf_counter() - began

    def quiesce(self, deadline_s: float) -> bool:
        """At the safe point: lets the copy under way end, whatever becomes of it.

        Returns False if one never seems to: it had not ended the last time, either. One that ends
        after this is not held, and not uploaded: what it reads may be overwritten from now on.
        """
        late, running = self._late, self._running
        with contextlib.suppress(Exception):  # then it is not held, as the holdings tell
            self.wait(deadline_s)
        with self._lock:
            self._epoch += 1
        if late is None:
            self._late = running
            return True
        wait([late], max(0.0, deadline_s - time.monotonic()))
        self._late = running
        return late.done()

    # ----------------------------------------------------------------- keeping

    def keep(self, holding: Holding, state: LocalState) -> None:
        """Keeps what was the live shard until a newer snapshot is held by all.

        After a change of layout the new cut has no second copy yet; the old one, whole over its
        holders, is what a failure right now would go back to.
        """
        kept = KeptShard(replace(holding, tier=Tier.HOST), state)
        with self._lock:
            self._held.append(kept)

    def note_step(self, line: RecordStep) -> None:
        """It was applied. The keeper is told with the next snapshot, as the controller may die."""
        with self._lock:
            self._record.append(line)

    def _take_record(self, step: int) -> tuple[RecordStep, ...]:
        """Of the steps up to ``step``, what the keeper was not told yet."""
        with self._lock:
            count = sum(line.step <= step for line in self._record)
            return tuple(self._record.popleft() for _ in range(count))

    def drop_before(self, step: int) -> None:
        """Frees every snapshot older than ``step`` that nobody reads."""
        with self._lock:
            gone = [s for s in self._held if s.of.step < step and not s.users]
            self._held = [s for s in self._held if s not in gone]
        self._recycle(gone)

    def drop_after(self, step: int) -> None:
        """Frees snapshots of steps that were rolled back."""
        with self._lock:
            gone = [s for s in self._held if s.of.step > step]
            self._held = [s for s in self._held if s not in gone]
            while self._record and self._record[-1].step > step:
                self._record.pop()
        self._recycle(gone)

    def discard(self, shard: HostShard | KeptShard) -> None:
        """It is damaged: no source any more."""
        with self._lock:
            self._held = [s for s in self._held if s is not shard]
        self._recycle([shard])

    def release(self, shard: HostShard) -> None:
        """An upload is done with ``shard``."""
        with self._lock:
            shard.users -= 1
            held = shard in self._held
        if not held:
            self._recycle([shard])

    def holdings(self) -> tuple[Holding, ...]:
        with self._lock:
            return tuple(s.of for s in self._held)

    def find(self, source: Source, shard: str) -> HostShard | KeptShard | None:
        """The copy of a shard of that state, own before peer's."""
        wanted = [Holding(source.step, source.space, shard, t, source.generation) for t in TIERS]
        with self._lock:
            found = [s for s in self._held if s.of in wanted]
        return min(found, key=lambda s: wanted.index(s.of), default=None)

    def newest(self) -> int:
        """The newest step of which this rank's own shard is held; 0 if none."""
        with self._lock:
            return max((s.of.step for s in self._held if _is_own_copy(s)), default=0)

    def corrupt(self, own: bool) -> None:
        """Flips a byte of each own snapshot, or of each copy kept for a peer: an injected fault."""
        with self._lock:
            for shard in self._held:
                if isinstance(shard, HostShard) and (shard.of.tier is Tier.HOST) == own:
                    shard.buffer.memory[0] ^= 1

    # ------------------------------------------------------------------ memory

    def use(self, keeper: KeeperClient) -> None:
        """Buffers are the keeper's from now on: what is in them outlives this process."""
        with self._lock:
            before, self._keeper = self._keeper, keeper
            useless, self._free = self._free, []
        if before is not None:  # lost, perhaps stopped: nobody waits for it any more
            before.close()
        self._let_go(useless)

    def _buffer(self, schema: Schema) -> Buffer:
        size = schema_bytes(schema) + DIGEST_BYTES
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.memory.numel() == size:
                    return self._free.pop(index)
            useless, self._free = self._free, []  # another layout's sizes
        self._let_go(useless)
        self.bytes_allocated += size
        return self._kept_buffer(size) or self._own_buffer(size)

    def _kept_buffer(self, size: int) -> Buffer | None:
        """One that the node's keeper owns, or None if there is no keeper, or it has no room."""
        keeper = self._keeper
        if keeper is None:
            return None
        try:
            path, memory = keeper.allocate(size)
        except (KeeperGone, KeeperRefused, OSError) as error:
            self._leave(keeper, error)
            return None
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self._pinned:
            pin(tensor)
        return Buffer(tensor, keeper, path)

    def _own_buffer(self, size: int) -> Buffer:
        tensor = torch.zeros(size, dtype=torch.uint8)
        return Buffer(tensor.pin_memory() if self._pinned else tensor)

    def _recycle(self, shards: Iterable[HostShard | KeptShard]) -> None:
        """They are no source any more; what no upload reads is used again."""
        gone = [s for s in shards if isinstance(s, HostShard)]
        for shard in gone:
            self._tell(shard.buffer, Unseal(shard.buffer.path))
        with self._lock:
            unread = [s for s in gone if not s.users and not s.recycled]
            for shard in unread:  # once: two snapshots in one buffer would be none
                shard.recycled = True
            buffers = [s.buffer for s in unread]
            sizes = {s.buffer.memory.numel() for s in self._held if isinstance(s, HostShard)}
            free, self._free = [*self._free, *buffers], []
            for buffer in free:
                fits = not sizes or buffer.memory.numel() in sizes
                if fits and buffer.keeper is self._keeper and len(self._free) < FREE_BUFFERS_MAX:
                    self._free.append(buffer)
            useless = [b for b in free if b not in self._free]
        self._let_go(useless)

    def _let_go(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self.bytes_allocated -= buffer.memory.numel()
            if buffer.keeper is not None:
                if self._pinned:
                    unpin(buffer.memory)
                self._tell(buffer, Free(buffer.path))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()


def _is_own_copy(shard: HostShard | KeptShard) -> bool:
    return isinstance(shard, HostShard) and shard.of.tier is Tier.HOST


class _Exchange:
    """Sends one shard to its buddy and receives those that this rank keeps."""

    def __init__(self, step: int, groups: Groups, peer_schemas: dict[int, Schema]) -> None:
        self.step, self.groups, self.peer_schemas = step, groups, peer_schemas
        self.group = groups.host

    def run(self, own: torch.Tensor, incoming: list[tuple[int, torch.Tensor]]) -> None:
        buddies = self.groups.assignment.buddies
        try:
            works = [self.group.recv([buffer], rank, self.step) for rank, buffer in incoming]
            works += [self.group.send([own], buddy, self.step) for buddy in buddies]
        except RuntimeError as error:
            raise GroupBroken(f"sending a snapshot: {error}") from error
        for work in works:
            self.groups.wait(work)


class _Source:
    """The live state, as it is when this is made: the next forward and backward may run already.

    Tensors that a forward changes (buffers) are copied at once. On a GPU the others are copied on
    a stream of their own, which waits for what is queued by now.
    """

    def __init__(self, state: LocalState) -> None:
        self.state = {
            key: replace(tensor, local=tensor.local.clone()) if tensor.volatile else tensor
            for key, tensor in state.items()
        }
        self._device = next((t.local.device for t in state.values() if t.local.is_cuda), None)
        self._queued: Any = None
        if self._device is not None:
            self._queued = torch.cuda.current_stream(self._device).record_event()

    def copy_to(self, shard: HostShard) -> None:
        """Returns when ``shard`` has it all."""
        sources = [tensor.local for _, tensor in sorted(self.state.items())]  # as in the schema
        targets = [tensor.local for tensor in shard.state().values()]
        if self._device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        stream = copy_stream(self._device)
        stream.wait_event(self._queued)
        with torch.cuda.stream(stream):  # in one call: thousands would keep training from its own
            torch._foreach_copy_(targets, sources, non_blocking=True)
        stream.synchronize()


@cache
def copy_stream(device: torch.device) -> Any:
    """One for all snapshots: torch's pool has few, and others use them, too."""
    return torch.cuda.Stream(device)
