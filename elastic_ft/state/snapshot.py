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
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from elastic_ft.core.assignment import Holding, Source, Tier
from elastic_ft.core.commands import RecordStep
from elastic_ft.errors import GroupBroken
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import Schema, shard_bytes
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.keeper.node_keeper import RECORD_STEPS
from elastic_ft.keeper.protocol import Unseal
from elastic_ft.state.host_memory import HostMemory
from elastic_ft.state.host_shards import Buffer, HostShard, KeptShard, make_schema
from elastic_ft.state.tensors import LocalState

TIERS = (Tier.HOST, Tier.PEER)  # own before peer's


class Snapshots:
    """The snapshots of one worker, over all generations.

    Args:
        unkept: is told that no keeper has this worker's snapshots, and why.
        run: the controller's start that it works for.
    """

    def __init__(
        self, worker: str, pinned: bool, unkept: Callable[[str], object], run: str = ""
    ) -> None:
        self.worker, self._unkept, self._run = worker, unkept, run
        self._memory = HostMemory(pinned, unkept)
        self._held: list[HostShard | KeptShard] = []
        self._record: deque[RecordStep] = deque(maxlen=RECORD_STEPS)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running: Future[None] | None = None
        self._late: Future[None] | None = None  # a copy of an epoch before that has not ended
        self._epoch = 0  # a copy of an epoch before is of no use, however it ends
        self._cost_s = 0.0
        self._busy_s = self._waited_s = 0.0

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

        def run() -> None:
            cpu_began, run_began = time.thread_time(), time.perf_counter()
            kept = self._fill(shard, source, reach, epoch, partial)
            if exchange is not None and on_held is not None:
                reach("buddy_send", step)
                self._exchange(shard, exchange, epoch)
                if kept or groups.assignment.is_cut:
                    on_held(step)
                else:
                    self._unkept(self._memory.why)
            if source.on_host:  # it takes processor time from training, not only bandwidth
                self._cost_s += time.thread_time() - cpu_began
            self._busy_s += time.perf_counter() - run_began

        self._running = self._thread.submit(run)
        self._delayed(time.perf_counter() - began)
        return shard

    def _delayed(self, seconds: float) -> None:
        self._cost_s += seconds
        self._waited_s += seconds

    def _fill(
        self, shard: HostShard, source: _Source, reach: Reach, epoch: int, partial: bool
    ) -> bool:
        """Copies the live state; then ``shard`` is ready. Returns whether a keeper has it."""
        try:
            try:
                reach("snapshot_copy", shard.of.step)
                schema = make_schema(source.state)
                shard.fill(schema, self._buffer(schema))
                source.copy_to(shard)
                shard.seal()
            finally:
                source.state = {}  # frames of an error would keep the live memory
            kept = self._keep_if_due([] if partial else [shard], epoch)
        except BaseException as error:
            self._recycle([shard])
            shard.ready.set_exception(error)  # an upload waits for it
            raise
        shard.ready.set_result(None)
        return kept

    def take_cost_s(self) -> float:
        """Seconds by which snapshots have delayed training since this was last asked."""
        cost_s, self._cost_s = self._cost_s, 0.0
        return cost_s

    def take_overlap(self) -> tuple[float, float]:
        """Seconds since this was last asked that training waited for snapshots, and that these took
        while it did not."""
        waited_s, busy_s = self._waited_s, self._busy_s
        self._waited_s = self._busy_s = 0.0
        return waited_s, max(0.0, busy_s - waited_s)

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
            self._memory.let_go(shard.buffer for _, shard in incoming)
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
            kept = self._memory.tell_sealed(shard.buffer, holding, shard.schema, record) and kept
        with self._lock:
            self._check(epoch)
            self._held += shards
        return kept

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
            self._delayed(time.perf_counter() - began)

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

    def move_out(self, holding: Holding, state: LocalState) -> None:
        """Makes sure that the live shard is in host memory, where it stays as ``keep`` keeps it:
        its device is needed for another layout.

        Not copied where the snapshot of just this state is held, and whole. A keeper without room
        for it keeps the snapshots of before, and has those to come.
        """
        of = replace(holding, tier=Tier.HOST)
        with self._lock:
            found = [s for s in self._held if isinstance(s, HostShard) and s.of == of]
        if any(shard.is_whole() for shard in found):
            return
        for shard in found:
            self.discard(shard)
        moved, schema = HostShard(of, self._run, moved_out=True), make_schema(state)
        source = _Source(state)
        buffer = self._buffer(schema, extra=True)
        try:
            source.copy_to(moved.fill(schema, buffer))
        except BaseException:
            self._memory.let_go([buffer])
            raise
        with self._lock:
            self._held.append(moved)

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

    def drop_moved_out(self) -> None:
        """What has left a device is in everybody's new layout, and no snapshot will follow."""
        with self._lock:
            gone = [s for s in self._held if isinstance(s, HostShard) and s.moved_out]
            self._held = [s for s in self._held if s not in gone]
        self._recycle(gone, again=False)

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
                if not isinstance(shard, HostShard) or shard.moved_out:
                    continue  # of live memory there is no digest
                if (shard.of.tier is Tier.HOST) == own:
                    shard.buffer.memory[0] ^= 1

    # ------------------------------------------------------------------ memory

    def use(self, keeper: KeeperClient) -> None:
        """Buffers are the keeper's from now on: what is in them outlives this process."""
        self._memory.use(keeper)

    @property
    def bytes_allocated(self) -> int:
        return self._memory.bytes_allocated

    def _buffer(self, schema: Schema, *, extra: bool = False) -> Buffer:
        return self._memory.take(shard_bytes(schema), extra=extra)

    def _recycle(self, shards: Iterable[HostShard | KeptShard], *, again: bool = True) -> None:
        """They are no source any more; what no upload reads is used ``again``, or freed."""
        gone = [s for s in shards if isinstance(s, HostShard)]
        for shard in gone:
            self._memory.tell(shard.buffer, Unseal(shard.buffer.path))
        with self._lock:
            unread = [s for s in gone if not s.users and not s.recycled]
            for shard in unread:  # once: two snapshots in one buffer would be none
                shard.recycled = True
            buffers = [s.buffer for s in unread]
            sizes = {s.buffer.memory.numel() for s in self._held if isinstance(s, HostShard)}
        if again:
            self._memory.give_back(buffers, sizes)
        else:
            self._memory.let_go(buffers)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._memory.close()


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

    Attributes:
        on_host: all but tensors that a forward changes, as with ``optimizer.offload`` on a GPU.
    """

    def __init__(self, state: LocalState) -> None:
        self.on_host = not any(t.local.is_cuda and not t.volatile for t in state.values())
        self.state = {
            key: replace(tensor, local=tensor.local.clone()) if tensor.volatile else tensor
            for key, tensor in state.items()
        }
        self._device = next((t.local.device for t in state.values() if t.local.is_cuda), None)
        self._queued: Any = None
        if self._device is not None:
            self._queued = torch.cuda.current_stream(self._device).record_event()

    def copy_to(self, shard: HostShard) -> None:
        """Returns when ``shard`` has it all; nothing is copied any more either if it raises."""
        sources = [tensor.local for _, tensor in sorted(self.state.items())]  # as in the schema
        targets = shard.parts()
        # In one call: for each of thousands training would have to give the interpreter away.
        if self._device is None:
            if sources:
                torch._foreach_copy_(targets, sources)
            return
        stream = copy_stream(self._device)
        stream.wait_event(self._queued)
        try:
            with torch.cuda.stream(stream):
                torch._foreach_copy_(targets, sources, non_blocking=True)
        finally:  # of some of them, too: both ends are another's then
            stream.synchronize()


@cache
def copy_stream(device: torch.device) -> Any:
    """One for all snapshots: torch's pool has few, and others use them, too."""
    return torch.cuda.Stream(device)
