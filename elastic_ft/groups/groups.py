"""Forming, fencing and tearing down the process groups of one generation (I1).

Against a stopped or vanished peer Gloo's own ``abort`` and ``destroy`` do nothing: a survivor that
is not a ring neighbour of the dead would wait out its timeout. So ``abort`` shuts down Gloo's
connected sockets, which ends every running and later operation in milliseconds. They are told
apart from others (Ray's gRPC, the controller's) by the addresses of Gloo's listeners, IP and port,
which peers exchange while forming: a port number alone means another server on each machine. NCCL
is aborted through its communicators. While one is being made torch holds the locks that its abort
needs, of what it is split from as well: who waits for it is left waiting, and the groups with it.

Gloo keeps each connection that it is offered until its group ends, also a stranger's. So once all
have formed its listeners take no more. NCCL's, which can't be told from them, do: its ranks connect
when they first need to.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_ft import torch_private
from elastic_ft.core.assignment import Member, NodeId, WorkerId
from elastic_ft.core.layouts.layout import OF_LAYERS, Layout
from elastic_ft.core.shares import Share
from elastic_ft.errors import GroupBroken, one_line
from elastic_ft.groups.rendezvous import Rendezvous
from elastic_ft.groups.store_links import (
    Address,
    SealedStore,
    Socket,
    StoreLinks,
    inet_sockets,
    shut_down,
    take_no_more,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
MEET_TIMEOUT_S = 10.0  # where there is no job that says it (``core.deadlines``)
# For what others do, restoring say: it takes as long as the state is large. The controller's
# deadline, which follows the bytes that come, is what ends it: these groups are aborted.
OTHERS_TIMEOUT_S = 24 * 3600.0
CONNECTS_LATE = "TORCH_GLOO_LAZY_INIT"  # set: Gloo's peers connect when they first need to
ABORT_POLL_S = 0.05
ABORT_GRACE_S = 0.2  # a closed connection ends what waits for it in milliseconds, or never
_LEFT: list[object] = []  # groups, for good: to free one is to wait for who makes another of it


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """One participant, as it tells the others. ``listeners``: Gloo's, in its process."""

    worker: WorkerId
    node: NodeId
    listeners: tuple[Address, ...] = ()


class Groups(Rendezvous):
    """The groups of one generation, as seen by one worker.

    Attributes:
        rank: rank in the world, or None for a donor.
        world_size: members of the world.
        mesh: over the non-trivial dimensions of the layout; None where all of them are one.
        context: the ranks that share positions; None where none do.
        experts: ``mesh`` with its shards split into "efsdp" and "ep"; None where experts are not
            shared out.
        host: a Gloo group over members and donors (in that order), for host memory.
        participant: this worker's rank in ``host``.
        peers: everyone in ``host``, this worker included, once the groups have formed.
        uses_nccl: the world has an NCCL backend.
        bytes_received: of the state, while it is restored: a deadline follows them.
    """

    def __init__(
        self,
        assignment: Share,
        member: Member,
        store: tuple[str, int] | StoreLinks,
        backend: str = "auto",
        meet_timeout_s: float = MEET_TIMEOUT_S,
    ) -> None:
        self.assignment, self.worker, self._node = assignment, member.worker, member.node
        self.rank, self.world_size = assignment.rank, assignment.members
        super().__init__(assignment.participant, assignment.participants, meet_timeout_s)
        self.peers: tuple[Peer, ...] = ()
        self.mesh: DeviceMesh | None = None
        self.context: dist.ProcessGroup | None = None
        self.experts: DeviceMesh | None = None
        self.host: Any = None
        self._bare_store: dist.Store | None = None
        self._sealed_store: SealedStore | None = None  # torch keeps no hold on what is Python of it
        self._links = store if isinstance(store, StoreLinks) else StoreLinks(store, meet_timeout_s)
        self._store_sockets: tuple[Socket, ...] = ()
        self._own_listeners: frozenset[Address] = frozenset()
        self._gloo_listeners: frozenset[Address] = frozenset()  # everyone's
        self._lock = threading.Lock()
        self._aborted = ""
        self.uses_nccl, self._backend = False, backend
        self._operation_timeout_s = meet_timeout_s
        self._guarded: set[Closable] = set()
        self._left_making: futures.Future[Any] | None = None  # one of these groups
        self._aborting: list[tuple[Any, threading.Thread]] = []  # NCCL's communicators
        self.bytes_received = 0

    # ------------------------------------------------------------------ forming

    def form(
        self,
        device: torch.device,
        operation_timeout_s: float,
        reach: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Connects to every participant. Raises GroupBroken when that fails or is aborted.

        ``reach`` is told when the first group is there and the others are not.
        """
        self.uses_nccl = self._is_for_nccl(device)
        try:
            self._connect_store()
            before = {s.inode for s in inet_sockets() if s.peer is None}
            self._make_groups(device, reach)
            fresh = [s for s in inet_sockets() if s.peer is None and s.inode not in before]
            self._exchange_listeners([s.local for s in fresh])
            self.barrier("formed")
            if not self.uses_nccl and not os.environ.get(CONNECTS_LATE):
                for listener in fresh:
                    take_no_more(listener)
            self.check()
        except GroupBroken:
            raise
        except Exception as error:  # torch raises many types; all mean: this generation is broken
            raise GroupBroken(f"forming generation {self.generation}: {one_line(error)}") from error
        self._operation_timeout_s = operation_timeout_s
        if self.rank is not None:
            torch_private.set_group_timeout(dist.group.WORLD, operation_timeout_s)

    def _is_for_nccl(self, device: torch.device) -> bool:
        return device.type == "cuda" and self._backend != "gloo"

    def deadline(self) -> float:
        """On the monotonic clock: when an operation begun now must have ended (I7)."""
        return time.monotonic() + self._operation_timeout_s

    @property
    def operation_timeout_s(self) -> float:
        return self._operation_timeout_s

    @property
    def generation(self) -> int:
        return self.assignment.generation

    def of_world(self) -> list[dist.ProcessGroup]:
        """Those of this rank that its layout has."""
        meshes = (mesh for mesh in (self.mesh, self.experts) if mesh is not None)
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        return groups if self.context is None else [*groups, self.context]

    def _connect_store(self) -> None:
        link = self._links.take()
        with self._lock:
            self._store_sockets = link.sockets
        prefix = f"g{self.generation}"
        self._sealed_store = SealedStore(link.store, self._links.key)
        self.store = dist.PrefixStore(prefix, self._sealed_store)
        self._bare_store = dist.PrefixStore(prefix, link.store)
        self.check()

    def _make_groups(self, device: torch.device, reach: Callable[[str], None]) -> None:
        timeout = datetime.timedelta(seconds=self._meet_timeout_s)
        assert self.store is not None
        store = dist.PrefixStore("host", self.store)
        self.host = self._connected(
            lambda: dist.ProcessGroupGloo(store, self.participant, self.participants, timeout)
        )
        reach("connecting")
        if self.rank is None:
            return
        with torch_private.groups_made_by(self._connected):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.uses_nccl else "gloo",
                # NCCL's own threads ask the store, where they must not wait for Python.
                store=dist.PrefixStore("world", self._bare_store if self.uses_nccl else self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=device if self.uses_nccl else None,
            )
            self.mesh = make_mesh(self.assignment.layout, device)
            self.context = _make_context(self.assignment.layout, self.uses_nccl)
            self.experts = _share_experts(self.assignment.layout, self.mesh)

    def _connected(self, connect: Callable[[], T]) -> T:
        """What ``connect`` returns. Raises GroupBroken once these groups are aborted.

        Who waits for a peer's connection has no socket that could be shut down, and Gloo waits for
        five of its timeouts: longer than a pause may take. So a thread of its own does.
        """
        made: Future[T] = Future()

        def run(sealed_store: object) -> None:  # it may ask that after the teardown
            try:
                made.set_result(connect())
            except Exception as error:
                made.set_exception(error)

        asked = (self._sealed_store,)
        threading.Thread(target=run, args=asked, name="connect", daemon=True).start()
        while not futures.wait([made], ABORT_POLL_S).done:
            if self._aborted and not futures.wait([made], ABORT_GRACE_S).done:
                self._left_making = made
                raise GroupBroken(self._aborted)
        return made.result()

    def _exchange_listeners(self, own: list[Address]) -> None:
        """Each listener has the address of one interface: the one that Gloo gives to its peers."""
        me = Peer(self.worker, self._node, tuple(own))
        self.peers = tuple(self.exchange_values("peers", me))
        everyones = frozenset(address for peer in self.peers for address in peer.listeners)
        with self._lock:
            self._own_listeners, self._gloo_listeners = frozenset(own), everyones

    def wait(self, *works: Any) -> None:
        """Waits for transfers over ``host``. Raises GroupBroken if one fails, is late or aborted.

        Gloo fails what is pending when a connection ends, but for one thing: a payload that is
        half through (``Pair::signalException`` leaves those buffers out) waits out its timeout.
        So a thread of its own waits; once these groups are aborted it is left behind.
        """
        ended: Future[None] = Future()
        deadline = self.deadline()

        def run() -> None:
            try:
                for work in works:
                    work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except Exception as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        threading.Thread(target=run, name="transfer", daemon=True).start()
        while not futures.wait([ended], ABORT_POLL_S).done:
            if self._aborted and not futures.wait([ended], ABORT_GRACE_S).done:
                raise GroupBroken(self._aborted)
        try:
            ended.result()
        except Exception as error:
            raise GroupBroken(one_line(error)) from error

    @contextlib.contextmanager
    def guard(self, connection: Closable) -> Iterator[None]:
        """Whoever waits for ``connection`` is woken when these groups are aborted: GroupBroken."""
        with self._lock:
            self._guarded.add(connection)
        try:
            self.check()
            yield
        except Exception:
            self.check()  # it was ended by us: that says nothing of the other end
            raise
        finally:
            with self._lock:
                self._guarded.discard(connection)

    def received(self, nbytes: int) -> None:
        """Bytes of the state have come. From any thread."""
        with self._lock:
            self.bytes_received += nbytes

    # ------------------------------------------------------------------ fencing

    def abort(self, reason: str) -> None:
        """Ends every running and later operation of these groups, from any thread. Idempotent.

        What runs on the device may end a little later: ``teardown`` waits for that.
        """
        with self._lock:
            self._aborted = self._aborted or reason
            guarded = tuple(self._guarded)
            own, everyones = self._own_listeners, self._gloo_listeners
            stores = {s.inode for s in self._store_sockets}
        for connection in guarded:
            connection.close()
        for found in list(inet_sockets()):
            if found.peer is None:
                continue  # a listener: shutting it down would abort the process
            is_gloo = found.local in own or found.peer in everyones
            if is_gloo or found.inode in stores:
                shut_down(found)
        if self.uses_nccl:
            self._abort_communicators()

    def _abort_communicators(self) -> None:
        """Each once, newest first, and all at the same time: aborting one may wait for kernels of
        another (pytorch#119797). torch aborts each in a thread of its own, so that an NCCL group
        around them, as in its ``_abort_process_group``, would cover nothing."""
        with self._lock:
            known = [backend for backend, _ in self._aborting]
            fresh = [
                b for b in torch_private.nccl_backends() if not any(b is other for other in known)
            ]
            begun = [
                (b, threading.Thread(target=_abort, args=(b,), name="nccl-abort", daemon=True))
                for b in fresh
            ]
            self._aborting += begun
        for _, thread in begun:
            thread.start()

    def check(self) -> None:
        """Raises GroupBroken if they were aborted."""
        if self._aborted:
            raise GroupBroken(self._aborted)

    @property
    def aborted(self) -> str:
        """Why these groups were aborted, or an empty string."""
        return self._aborted

    def teardown(self, in_use: list[object] | None = None) -> None:
        """Frees the groups; nothing may use them any more. Called at the safe point only.

        ``in_use``: given where a thread still waits in one: they are put there, for to free a
        group is to wait for what it does.
        """
        self.abort(self._aborted or "teardown")
        leave = self.uses_nccl and self._left_making is not None and not self._left_making.done()
        for _, thread in self._aborting:  # what is not aborted is flushed when it is destroyed
            thread.join(ABORT_GRACE_S if leave else self._operation_timeout_s)
        if in_use is not None:
            in_use += [self.host, self.mesh, self.context, self.experts]
            in_use += torch_private.process_groups()
        self.mesh = self.context = self.experts = None
        self.host = None
        self.store = self._bare_store = None
        _LEFT.extend(torch_private.end_groups(leave))
        torch_private.forget_meshes()
        self._aborting = []
        self._sealed_store = None  # last: what is torn down may still ask it


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    dims = layout.mesh_dims()
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    if layout.cuts_layers:
        torch_private.name_groups(mesh, OF_LAYERS)
    return mesh


def _share_experts(layout: Layout, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if not layout.shares_experts:
        return None
    assert mesh is not None
    return torch_private.split_dimension(mesh, "dp_shard", layout.expert_mesh_dims())


def _make_context(layout: Layout, split: bool = False) -> dist.ProcessGroup | None:
    """This rank's group of those that share positions.

    ``split``: from the world's communicator, as the mesh's groups of NCCL are: ``new_group`` would
    wait for all ranks with the interpreter's lock held, and nobody could break that off.
    """
    if len(layout.context_of(0)) == 1:
        return None
    sharing = {layout.context_of(rank) for rank in range(layout.world_size)}
    ordered = [list(ranks) for ranks in sorted(sharing, key=lambda ranks: ranks.start)]
    if split:
        own = dist.split_group(split_ranks=ordered, group_desc="context")
    else:
        own, _ = dist.new_subgroups_by_enumeration(ordered)
    assert own is not None
    return own


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # this process will be killed for not coming to its safe point
        log.warning("aborting a communicator: %s", one_line(error))
