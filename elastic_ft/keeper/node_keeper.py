"""The node keeper: owns the snapshots of its node's workers, in memory that outlives them.

One process per node, without torch. A worker asks it for buffers, maps them, and writes its
snapshots (and the copies it keeps for peers) straight into them; the keeper learns which are
sealed. When the worker is gone (killed, aborted, out of memory), the keeper tells the controller
what it left, and serves it to whoever needs it. It also writes checkpoints to the object store,
from the same memory: uploads take neither the interpreter lock nor a copy from training. When the
controller is gone and there is no other, what it has goes there, too, and then it ends
(``keeper.emergency``).

Buffers are anonymous memory (memfd), opened by workers through /proc: nothing is left behind
whoever is killed, and a small /dev/shm (64 MiB in a default container) is no limit.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from elastic_ft.core.assignment import KEEPER, Holding, Keeper, Member, NodeId, WorkerId
from elastic_ft.core.commands import DropKept, RecordStep, ReleaseWorker
from elastic_ft.core.events import KeeperHolds, KeeperReady
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateDamaged, StoreFailed
from elastic_ft.keeper import emergency, protocol
from elastic_ft.keeper.buffer import (
    ByteArray,
    Schema,
    Slot,
    bytes_of_box,
    is_whole,
    label,
    shard_bytes,
)
from elastic_ft.keeper.processes import inspect
from elastic_ft.storage import shards
from elastic_ft.storage.shards import OBJECT_DEADLINE_S
from elastic_ft.storage.store import Store, open_store
from elastic_ft.transport.control import Inspect, NodeHealth, Welcome
from elastic_ft.transport.lifeline import Lifeline
from elastic_ft.transport.messages import MessageRefused
from elastic_ft.transport.reception import Reception
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Channel

HEALTH_EVERY_S = 5.0  # at most: often enough that silence is told from a pause
BEATS_PER_TIMEOUT = 5
RECORD_STEPS = 2000  # kept per worker: so far behind may the controller be when it is killed
WORKERS_END_S = 10.0  # after the controller; what they had is complete then
SPARE_BYTES = 256 << 20  # of the node's memory that snapshots leave free

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Segment:
    """One buffer, of which a shard fills the beginning.

    Attributes:
        holding: what is sealed in it, or None.
        verified: its digest was found right since it was sealed.
    """

    fd: int
    buffer: ByteArray
    holding: Holding | None = None
    schema: Schema = ()
    verified: bool = False

    @property
    def content(self) -> ByteArray:
        """Of the shard that is sealed in it."""
        return self.buffer[: shard_bytes(self.schema)]


@dataclass(slots=True)
class BufferOwner:
    """A worker, its buffers by path, and the last steps that it applied."""

    worker: WorkerId
    pid: int = 0  # 0: not known
    segments: dict[str, Segment] = field(default_factory=dict)
    record: dict[int, RecordStep] = field(default_factory=dict)

    def note(self, lines: Iterable[RecordStep]) -> None:
        """A step that was trained again replaces what was known of it."""
        self.record |= {line.step: line for line in lines}
        for step in sorted(self.record)[:-RECORD_STEPS]:
            del self.record[step]

    def sealed(self) -> list[tuple[Segment, Holding]]:
        return [(s, s.holding) for s in self.segments.values() if s.holding is not None]

    def free(self, *, sealed: bool) -> None:
        """What is not sealed; what is, too, if told so."""
        for path, segment in list(self.segments.items()):
            if sealed or segment.holding is None:
                os.close(self.segments.pop(path).fd)


class NodeKeeper:
    """Args:
    controller, key: of the controller; workers and peers of the job have the key as well.
    host: this node's address, as the other nodes reach it.
    """

    def __init__(self, controller: tuple[str, int], key: JobKey, node: NodeId, host: str) -> None:
        self.node = node
        self._lock = threading.Lock()
        self._owners: dict[WorkerId, BufferOwner] = {}
        self._left: dict[WorkerId, BufferOwner] = {}  # workers that are gone, with what they sealed
        self._stores: dict[str, Store] = {}
        member = Member(KEEPER + node, node, os.uname().nodename, os.getpid())
        self._controller = Lifeline(controller, key, member)
        self._welcome = self._controller.welcome
        ports = self._welcome.job.network.port_range
        self._reception = Reception("keeper", host, key, protocol.TO_KEEPER, self._serve, ports)
        address = (host, self._reception.port)
        self._reception.start()
        self._controller.keeper = Keeper(node, address)
        threading.Thread(target=self._watch_node, name="keeper-health", daemon=True).start()
        self._controller.send(KeeperReady(time.time(), self._controller.keeper))

    @property
    def is_alone(self) -> bool:
        """Its controller has ended, or says nothing, and another is looked for."""
        return self._controller.is_alone

    @property
    def silent_s(self) -> float:
        """Since the controller was last heard."""
        return self._controller.silent_s

    @property
    def timeout_s(self) -> float:
        """For who is asked whether it lives."""
        return self._welcome.job.elastic.heartbeat_timeout_s

    @property
    def notices(self) -> str:
        """The job's ``elastic.notices``."""
        return self._welcome.job.elastic.notices

    def serve(self) -> None:
        """Follows controllers until there is none, then saves what is here. Blocks."""
        self._controller.start(self._tell_again)
        try:
            self._follow()
        finally:
            self._controller.close()

    def _follow(self) -> None:
        while True:
            try:
                message = self._controller.receive()
                if isinstance(message, DropKept):
                    self._drop(message.worker)
                elif isinstance(message, Inspect):
                    inspect(self._controller, message.worker, message.pid)
            except EOFError:
                break
            except Exception:  # what is here is saved all the same
                log.exception("keeper of %s: what the controller says can't be done", self.node)
                break
            if isinstance(message, ReleaseWorker):  # it publishes, or has another in our place
                log.info("keeper of %s ends: %s", self.node, message.reason)
                return
        self._save()

    def _tell_again(self, welcome: Welcome) -> None:
        """To the next controller: what ended workers left here."""
        with self._lock:
            left = [*self._left.values()]
        for owner in left:
            self._tell_left(owner)

    def _save(self) -> None:
        """The controller can publish nothing any more: see ``keeper.emergency``."""
        run, itself = self._welcome.run, emergency.keeper_name(self.node, secrets.token_hex(4))
        store, unsaid = self._store(self._welcome.checkpoint_url), ""
        try:
            emergency.begin(store, run, itself, self.node)
        except StoreFailed as error:  # it may work in a moment
            unsaid = self.node
            log.error("keeper of %s: it can't say that it saves: %s", self.node, error)
        deadline_s = time.monotonic() + WORKERS_END_S
        while self._owners and time.monotonic() < deadline_s:
            time.sleep(0.02)
        with self._lock:
            owners = [*self._owners.values(), *self._left.values()]
            held = [
                emergency.SavedShard(holding, segment.schema, segment.content, owner.record)
                for owner in owners
                for segment, holding in owner.sealed()
            ]
        within_s = self._welcome.job.elastic.suspend_timeout_s
        for failed in emergency.save(store, run, itself, held, within_s=within_s, unsaid=unsaid):
            log.error("keeper of %s: not saved: %s", self.node, failed)

    # ------------------------------------------------------------------ connections

    def _serve(self, channel: Channel) -> None:
        owner: BufferOwner | None = None
        while True:
            try:
                message = channel.receive()
            except EOFError as error:
                if isinstance(error, MessageRefused):
                    log.error("keeper of %s: %s", self.node, error)
                break
            if isinstance(message, protocol.Attach):
                owner = self._attach(message.worker, message.pid)
            else:
                answer = self._answer(owner, message)
                if answer is not None:
                    channel.send(answer)
        if owner is not None:
            self._orphan(owner)

    def _answer(self, owner: BufferOwner | None, message: Any) -> Any:
        """The answer to a request; a Refusal rather than an exception. None: none is due."""
        try:
            if isinstance(message, protocol.Describe):
                return protocol.Described(self._find(message).schema)
            if isinstance(message, protocol.Read):
                return protocol.Content(self._read(message))
            if isinstance(message, protocol.Upload):
                return protocol.Uploaded(tuple(self._upload(message)))
            assert owner is not None, "attach first"
            if isinstance(message, protocol.Allocate):
                return self._allocate(owner, message.nbytes)
            self._note(owner, message)
        except Exception as error:  # the one who asks decides what it means
            is_damaged = isinstance(error, StateDamaged)
            return protocol.Refusal(f"{type(error).__name__}: {error}", is_damaged)
        return None

    # ---------------------------------------------------------------------- buffers

    def _attach(self, worker: WorkerId, pid: int) -> BufferOwner:
        with self._lock:
            return self._owners.setdefault(worker, BufferOwner(worker, pid))

    def _allocate(self, owner: BufferOwner, nbytes: int) -> protocol.Allocated | protocol.Refusal:
        free = free_memory()
        if nbytes + SPARE_BYTES > free:
            return protocol.Refusal(
                f"a buffer takes {nbytes:,} bytes, {free:,} are free on the node"
            )
        fd = os.memfd_create("elastic_ft-snapshot", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # all of it now: never a fault on writing
            buffer = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except OSError as error:
            os.close(fd)
            return protocol.Refusal(f"a buffer of {nbytes:,} bytes: {error}")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        with self._lock:
            owner.segments[path] = Segment(fd, buffer)
        return protocol.Allocated(path)

    def _note(
        self, owner: BufferOwner, message: protocol.Unseal | protocol.Sealed | protocol.Free
    ) -> None:
        with self._lock:
            segment = owner.segments.get(message.path)
            if segment is None:
                return  # freed before
            if isinstance(message, protocol.Sealed):
                segment.holding, segment.verified = message.holding, False
                segment.schema = segment.schema if message.schema is None else message.schema
                owner.note(message.record)
            else:
                segment.holding = None
            if isinstance(message, protocol.Free):
                del owner.segments[message.path]
                os.close(segment.fd)

    def _orphan(self, owner: BufferOwner) -> None:
        """The worker is gone: what it sealed stays, and the controller learns of it."""
        with self._lock:
            self._owners.pop(owner.worker, None)
            owner.free(sealed=False)
            self._left[owner.worker] = owner
        self._tell_left(owner)

    def _tell_left(self, owner: BufferOwner) -> None:
        with self._lock:
            held = tuple(holding for _, holding in owner.sealed())
            newest = max((holding.step for holding in held), default=0)
            record = tuple(line for step, line in sorted(owner.record.items()) if step <= newest)
        self._controller.send(KeeperHolds(time.time(), self.node, owner.worker, held, record))

    def _drop(self, worker: WorkerId) -> None:
        with self._lock:
            if (left := self._left.pop(worker, None)) is not None:
                left.free(sealed=True)

    # ---------------------------------------------------------------------- serving

    def _find(self, wanted: protocol.Describe | protocol.Read) -> Segment:
        """What was left of a shard. Raises StateDamaged if its bytes are not those sealed."""
        of = wanted.holding
        with self._lock:
            left = self._left.get(wanted.worker, BufferOwner(wanted.worker))
            found = [segment for segment, holding in left.sealed() if holding == of]
        for segment in found:
            if not segment.verified:
                segment.verified = self._is_whole(segment, of)
            if segment.verified:
                return segment
        what = "digest differs" if found else "is not kept here"
        message = f"shard {of.shard} of step {of.step}, left by {wanted.worker}: {what}"
        raise StateDamaged(message, self.node)

    def _read(self, wanted: protocol.Read) -> bytes:
        segment = self._find(wanted)
        slots: dict[str, list[Slot]] = {}
        for slot in segment.schema:
            slots.setdefault(slot.name, []).append(slot)
        parts = [
            bytes_of_box(segment.buffer, _slot(slots[name], box), box) for name, box in wanted.parts
        ]
        payload = b"".join(memoryview(part) for part in parts)
        # Where the worker's line ended, and it lives, it may write there all the same.
        if self._lives(wanted.worker) and not self._is_whole(segment, wanted.holding):
            segment.verified = False
            message = f"what {wanted.worker} left is being written to"
            raise StateDamaged(message, self.node)
        return payload + xxhash.xxh3_128_digest(payload)

    def _lives(self, worker: WorkerId) -> bool:
        """Whether the process of a worker that left something may still be there."""
        with self._lock:
            left = self._left.get(worker)
        if left is None or not left.pid:
            return True
        try:
            return bool(psutil.Process(left.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def _upload(self, wanted: protocol.Upload) -> Any:
        """From the buffer to the store. The worker keeps the buffer as it is meanwhile."""
        buffer = self._mapped(wanted.path)[: shard_bytes(wanted.schema)]
        sealed_as = label(self._welcome.run, wanted.holding, wanted.schema)
        if not is_whole(
            buffer, sealed_as
        ):  # else it would be given a new digest, and pass for good
            raise StateDamaged("the snapshot's digest differs: it is not written", self.node)
        pieces = (
            (slot.name, slot.box, slot.dtype, memoryview(bytes_of_box(buffer, slot, slot.box)))
            for slot in wanted.schema
            if (slot.name, slot.box) in wanted.owned and slot.nbytes
        )
        store = self._store(wanted.url)
        pace = shards.RateLimit(wanted.max_mb_per_s * 1e6) if wanted.max_mb_per_s else None
        return shards.write_shards(store, wanted.prefix, wanted.rank, pieces, pace=pace)

    def _is_whole(self, segment: Segment, of: Holding) -> bool:
        return is_whole(segment.content, label(self._welcome.run, of, segment.schema))

    def _store(self, url: str) -> Store:
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url, deadline_s=OBJECT_DEADLINE_S)
            return self._stores[url]

    def _mapped(self, path: str) -> ByteArray:
        with self._lock:
            for owner in self._owners.values():
                if path in owner.segments:
                    return owner.segments[path].buffer
        raise KeyError(f"{path} is no buffer of a worker here")

    # --------------------------------------------------------------------- the node

    def _watch_node(self) -> None:
        """Tells how the node is; told so often, it is the keeper's heartbeat as well."""
        timeout_s = self._welcome.job.elastic.heartbeat_timeout_s
        every_s = min(HEALTH_EVERY_S, timeout_s / BEATS_PER_TIMEOUT)
        while True:
            with self._lock:
                owned = [s for o in self._owners.values() for s in o.segments.values()]
                left = [s for o in self._left.values() for s in o.segments.values()]
                nbytes = sum(s.buffer.nbytes for s in (*owned, *left))
            disk = psutil.disk_usage(tempfile.gettempdir())
            health = NodeHealth(self.node, nbytes, free_memory(), disk.free)
            if not self._controller.send(health) and self._controller.is_closed:
                return
            time.sleep(every_s)


def _slot(slots: list[Slot], box: Box) -> Slot:
    """The one that has ``box``: some layouts hold a tensor in several boxes."""
    return next((slot for slot in slots if slot.box.intersect(box) == box), slots[0])


def free_memory() -> int:
    """Bytes that this node, or the container we are in, can still give."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
