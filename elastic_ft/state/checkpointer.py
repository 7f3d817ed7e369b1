"""This rank's part of a checkpoint, written from host memory while training goes on.

Each tensor box is written once, by one of its replicas, the bytes spread evenly over the ranks.
The controller publishes the manifest when every rank has reported its shards (I5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_ft.core.box_owners import find_owners
from elastic_ft.core.events import ShardsFailed, ShardsWritten
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StoreFailed
from elastic_ft.faults import Reach
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import bytes_of_box
from elastic_ft.keeper.keeper_client import KeeperGone, KeeperRefused
from elastic_ft.keeper.protocol import Upload
from elastic_ft.state.host_shards import HostShard
from elastic_ft.state.placed import Placed
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.state.tensors import LocalState, tensor_name
from elastic_ft.storage import shards
from elastic_ft.storage.shards import OBJECT_DEADLINE_S
from elastic_ft.storage.store import open_store
from elastic_ft.transport.control import Note

COPIED_TIMEOUT_S = 3600.0  # last resort: a copy in host memory ends with its generation

AGAIN_S, AGAIN_MAX_S = 0.5, 5.0  # before the last state is written again
LOOK_S = 0.1

OwnedBoxes = frozenset[tuple[str, Box]]
Entries = tuple[dict[str, Any], ...]


def owned_by(groups: Groups, placed: Placed) -> OwnedBoxes:
    """Which boxes this rank writes."""
    me = str(groups.participant)
    owned = find_owners(me, placed.needed, placed.itemsizes)
    return frozenset((one.tensor, one.box) for one in owned if one.owner == me)


@dataclass(frozen=True, slots=True)
class StorePatience:
    """With a store that fails: while ``insists`` says so it is tried again, for ``away_s``."""

    away_s: float
    insists: Callable[[], bool]
    what: str = "the last"  # that step is


class Checkpointer:
    def __init__(
        self,
        worker: str,
        run: str,
        url: str,
        snapshots: Snapshots,
        send: Callable[[Any], object],
        reach: Reach,
        max_upload_mb_per_s: float | None = None,
    ) -> None:
        self._worker, self._run, self._url = worker, run, url
        self._snapshots, self._send, self._reach = snapshots, send, reach
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: list[Future[None]] = []
        self._insisted = (0, 0.0)  # on which step, since when
        self._store: Any = None
        self._max_mb_per_s = max_upload_mb_per_s
        self._pace = shards.RateLimit(max_upload_mb_per_s * 1e6) if max_upload_mb_per_s else None

    def owned_state(self, state: LocalState, owned: OwnedBoxes) -> LocalState:
        return {key: t for key, t in state.items() if (tensor_name(key), t.box) in owned}

    def write(
        self,
        shard: HostShard,
        owned: OwnedBoxes,
        state: LocalState,
        groups: Groups,
        patience: StorePatience,
    ) -> None:
        """Starts writing what this rank owns of ``shard``; reports ShardsWritten or -Failed."""
        shard.users += 1
        tensors = {tensor_name(key): (t.dtype, t.shape) for key, t in state.items()}
        self._running = [f for f in self._running if not f.done()]
        self._running.append(
            self._pool.submit(
                self._upload,
                shard,
                owned,
                tensors,
                groups.generation,
                groups.rank,
                time.monotonic(),
                patience,
            )
        )

    def _upload(
        self,
        shard: HostShard,
        owned: OwnedBoxes,
        tensors: dict[str, tuple[str, tuple[int, ...]]],
        generation: int,
        rank: int,
        began_s: float,
        patience: StorePatience,
    ) -> None:
        try:
            shard.ready.result(COPIED_TIMEOUT_S)
            self._reach("checkpoint_shard", shard.of.step)
            prefix = shards.attempt_prefix(self._run, generation, shard.of.step)
            write = partial(self._write_shards, shard, owned, prefix, rank)
            entries = self._insist(write, patience, generation, shard.of.step)
            self._reach("before_manifest", shard.of.step)
        except Exception as error:  # a full disk, a store that is down: training goes on
            reason = f"{type(error).__name__}: {error}"
            self._send(ShardsFailed(time.time(), self._worker, generation, shard.of.step, reason))
        else:
            self._send(
                ShardsWritten(
                    time.time(),
                    self._worker,
                    generation,
                    shard.of.step,
                    tuple(entries),
                    tensors,
                    round(time.monotonic() - began_s, 4),
                )
            )
        finally:
            self._snapshots.release(shard)

    def _insist(
        self, write: Callable[[], Entries], patience: StorePatience, generation: int, step: int
    ) -> Entries:
        """Raises what ``write`` does: what a second try can't cure, or the last one's. A step's
        time runs on through generations."""
        if self._insisted[0] != step:
            self._insisted = (step, time.monotonic())
        until_s, pause_s = self._insisted[1] + patience.away_s, AGAIN_S
        while True:
            try:
                entries = write()
                self._insisted = (0, 0.0)
                return entries
            except StoreFailed as error:
                if time.monotonic() > until_s:
                    raise
                _rest(pause_s, patience.insists)
                if not patience.insists():  # what it wrote from now on might be swept already
                    raise
                why = f"step {step} is {patience.what}, and is written again and again: {error}"
            if pause_s == AGAIN_S:
                self._send(Note(self._worker, generation, "checkpoint_warning", why))
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    def _write_shards(self, shard: HostShard, owned: OwnedBoxes, prefix: str, rank: int) -> Entries:
        """By the keeper whose memory it is; here, if there is none.

        Raises StoreFailed, StateDamaged, KeeperRefused.
        """
        keeper = shard.buffer.keeper
        if keeper is not None:
            path, schema, rate = shard.buffer.path, shard.schema, self._max_mb_per_s
            request = Upload(path, shard.of, schema, owned, self._url, prefix, rank, rate)
            try:
                return keeper.upload(request)
            except KeeperGone:
                pass  # the memory is still mapped here
            except KeeperRefused as error:
                if error.damaged:
                    raise
                # Its store is away, or it has this memory no more: that may be otherwise here.
        if self._store is None:
            self._store = open_store(self._url, deadline_s=OBJECT_DEADLINE_S)
        shard.verify(self._worker)  # else it would be given a new digest, and pass for good
        pieces = _pieces(shard, owned)
        return shards.write_shards(self._store, prefix, rank, pieces, pace=self._pace)

    def wait_all(self, timeout_s: float) -> bool:
        """Waits for uploads under way. Returns whether all have ended."""
        return not wait(self._running, timeout_s).not_done

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _rest(pause_s: float, insists: Callable[[], bool]) -> None:
    until_s = time.monotonic() + pause_s
    while time.monotonic() < until_s and insists():
        time.sleep(LOOK_S)


def _pieces(shard: HostShard, owned: OwnedBoxes) -> Iterator[tuple[str, Box, str, memoryview]]:
    for slot in shard.schema:
        if (slot.name, slot.box) in owned and slot.nbytes:
            yield (
                slot.name,
                slot.box,
                slot.dtype,
                memoryview(bytes_of_box(shard.buffer.bytes, slot, slot.box)),
            )
