"""The seam between the controller and whatever hosts worker processes (plain processes, Ray)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from elastic_ft.core.assignment import Assignment, NodeId, WorkerId
from elastic_ft.core.events import Event
from elastic_ft.transport.tls import JobKey

Tell = Callable[[Event], None]  # thread-safe; how a host reports

# Of every worker's process, from its beginning: libraries read these when they are loaded.
WORKER_ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a lost peer is no news here: the journal says it
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog aborts, not torch
    # Of those that don't block, torch holds the locks while it waits, and who enqueues as they are
    # aborted waits on (ADR 13).
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else its watchdog ends the process, untold
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # or what looks after that one does, minutes later
    # It sleeps four times that over an error, and the end of its group waits for it: a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # each rank would ask the controller's store every second
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # then nobody reads what each collective's caller was
    # The first thread does not train. Another's heap is made of pieces that glibc gives back and
    # faults in again with every step: with a model on the CPU that is a tenth of the time.
    "MALLOC_ARENA_MAX": "1",
}


class Host(Protocol):
    """Starts and kills worker processes, and reports what becomes of them.

    A started worker calls ``this_process.run_worker`` with the controller's address; from then on
    the two talk over their own connection. A host reports ``WorkerLost`` as soon as it knows of
    a process's end (the connection's end reports too: first come, first served), ``NodeLost`` and
    ``NodeDraining``. On each node that hosts workers it keeps a ``keeper.node_keeper.NodeKeeper``
    running, in a process of its own, and starts another, a few times, where one has ended.

    Workers and keepers may outlive their controller, and then belong to the next one's host. They
    connect with the same key, which is the host's to keep: who makes the host gives the same one to
    each controller of a run (``Controller(key=...)``).

    Who calls: the controller, each method in its one thread, on which everybody waits; after
    ``start``, which only ``survivors`` and ``use_places`` come before, until ``close`` or
    ``leave``, of which one is last. So no method blocks for longer than a few milliseconds,
    ``start`` (a fork server may have to come up) and ``close`` excepted: starting a process, asking
    a cluster, killing happen in threads of the host's own. Those call the inbox that ``start`` is
    given: it may be called from any thread and never blocks. Failing to start a worker is no
    exception but ``WorkerLost``, or patience: capacity may come.

    Attributes:
        successor_within_s: of this controller's end, where the next one is started by somebody who
            makes no sign of life before that one does; else 0.
    """

    successor_within_s: float = 0.0

    def survivors(self) -> frozenset[WorkerId]:
        """Workers, and keepers (``KEEPER`` and the node), of this run that live, and that a
        controller before this one had started. They are this host's from now on: it tells of their
        end, kills them, counts them among those that are wanted. Empty: there is nobody.

        Called once at most, before ``start``; it may take as long as that. Where they are not
        adopted they end by themselves, which is told as any worker's end.
        """

    def start(self, inbox: Tell, address: tuple[str, int], key: JobKey) -> None:
        """Called once, before all but ``survivors``. Workers connect to ``address`` with
        ``key``; those that survived find it themselves (``transport.succession``)."""

    def want_workers(self, total: int) -> None:
        """Keep ``total`` workers alive or starting; start replacements as capacity allows."""

    def use_places(self, places: dict[NodeId, int]) -> None:
        """Start workers on these nodes alone, no more than so many on each, until other places are
        named. Those that are elsewhere stay. May come before ``start``."""

    def avoid_node(self, node: NodeId, for_s: float) -> None:
        """Start no worker on ``node`` for so long; those that are there stay."""

    def kill_worker(self, worker: WorkerId) -> None:
        """SIGKILL the worker; idempotent. Its WorkerLost follows."""

    def kill_keeper(self, node: NodeId) -> None:
        """SIGKILL the node's keeper, which hangs, if there is one; another takes its place."""

    def prepare(self, assignment: Assignment) -> dict[WorkerId, dict[str, Any]]:
        """Extras for each member, handed to its ``on_generation`` hook before it forms."""

    def formed(self, assignment: Assignment) -> None:
        """Every member of ``assignment`` is training."""

    def close(self, keepers_s: float = 0.0) -> None:
        """Kill what is left and free everything. Bounded.

        ``keepers_s``: keepers first get so long to end by themselves: they save what they have.
        """

    def leave(self) -> None:
        """Free what is this process's own, and kill nobody: another controller has the job, and
        whoever lives is its. Bounded. In place of ``close``, and at any time.
        """
