"""The runtime on plain processes of this machine, no Ray: tests, debugging, a single GPU box.

Nodes are virtual: a name and a number of slots. Killing a node kills its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_any
from multiprocessing.process import BaseProcess
from typing import Any

from elastic_ft.config import Job
from elastic_ft.controller.host import WORKER_ENVIRONMENT, Inbox
from elastic_ft.core.events import (
    EVERYONES,
    Assignment,
    NodeDraining,
    NodeId,
    NodeLost,
    WorkerId,
    WorkerLost,
    WorkerRaised,
)
from elastic_ft.faults import PointFault
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.title import set_title
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.devices import VISIBLE, gpus_of_machine, one_gpu

ENVIRONMENT = WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
START_FAILURES_MAX = 5  # before any worker has trained: then the job can't start here
KEEPER_STARTS_MAX = 4  # on one node
WATCH_EVERY_S = 0.5
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_STARTING = threading.Lock()  # what a start changes is the whole process's


@dataclass(slots=True)
class LocalNode:
    name: str
    slots: int
    alive: bool = True
    draining: bool = False
    avoided_until_s: float = 0.0  # on the monotonic clock
    workers: set[WorkerId] = field(default_factory=set)
    keeper: BaseProcess | None = None
    keepers_left: int = KEEPER_STARTS_MAX


class LocalHost:
    """Worker processes on virtual nodes.

    Args:
        nodes: name -> slots.
        environment: for the workers, beside this process's own and ``ENVIRONMENT``.
    """

    def __init__(self, nodes: dict[str, int], environment: dict[str, str] | None = None) -> None:
        self._nodes = {name: LocalNode(name, slots) for name, slots in nodes.items()}
        self.worker_environment = ENVIRONMENT | (environment or {})
        self._processes: dict[WorkerId, BaseProcess] = {}
        self._gpus = gpus_of_machine()
        self._shown: dict[WorkerId, str | None] = {}  # the GPU of each that is alive
        self._lock = threading.RLock()
        self._wanted = 0
        self._count = 0
        self._timers: list[threading.Timer] = []
        self._closed = False
        self._formed = False  # some workers have trained here
        self._failures = 0  # of workers, before any has
        self._inbox: Inbox | None = None
        self._address: tuple[str, int] = ("", 0)
        self._key = JobKey(b"")
        self._context = multiprocessing.get_context("forkserver")

    # ------------------------------------------------------------------ Host

    def start(self, inbox: Inbox, address: tuple[str, int], key: JobKey) -> None:
        self._inbox, self._address, self._key = inbox, address, key
        start_fork_server(self.worker_environment)
        with self._lock:
            for node in self._nodes.values():
                self._start_keeper(node)
        threading.Thread(target=self._watch, name="local-host", daemon=True).start()

    def want_workers(self, total: int) -> None:
        with self._lock:
            self._wanted = total
            self._fill()

    def avoid_node(self, node: NodeId, for_s: float) -> None:
        with self._lock:
            self._nodes[node].avoided_until_s = time.monotonic() + for_s
        self._later(for_s, self._fill_again)

    def _fill_again(self) -> None:
        with self._lock:
            self._fill()

    def kill_worker(self, worker: WorkerId) -> None:
        with self._lock:
            process = self._processes.get(worker)
            if process is not None:
                _kill(process)

    def kill_keeper(self, node: NodeId) -> None:
        with self._lock:
            keeper = self._nodes[node].keeper
            if keeper is not None:
                _kill(keeper)

    def prepare(self, assignment: Assignment) -> dict[WorkerId, dict[str, Any]]:
        return {}

    def formed(self, assignment: Assignment) -> None:
        self._formed = True

    def close(self, keepers_s: float = 0.0) -> None:
        with self._lock:
            self._closed, self._wanted = True, 0
            keepers = [node.keeper for node in self._nodes.values() if node.keeper is not None]
            workers = list(self._processes.values())
        for timer in self._timers:
            timer.cancel()
        for process in workers:
            _kill(process)
        until_s = time.monotonic() + keepers_s
        for keeper in keepers:
            keeper.join(max(0.0, until_s - time.monotonic()))
            _kill(keeper)
        for process in (*workers, *keepers):
            process.join(10)

    # ------------------------------------------------------- what a cluster would do

    def add_node(self, name: str, slots: int | None = None) -> None:
        """``slots``: as the first node has, unless given."""
        with self._lock:
            slots = slots or next(iter(self._nodes.values())).slots
            node = self._nodes[name] = LocalNode(name, slots)
            self._start_keeper(node)
            self._fill()

    def kill_node(self, name: str, notice_after_s: float = 0.0) -> None:
        """SIGKILLs all of the node's processes, and reports the node lost a little later."""
        with self._lock:
            node = self._nodes[name]
            node.alive = False
            if node.keeper is not None:
                _kill(node.keeper)
            for worker in list(node.workers):
                self.kill_worker(worker)

        def report() -> None:
            self._post(NodeLost(time.time(), name, "the node was killed"))

        self._later(notice_after_s, report)

    def keeper_of(self, name: str) -> int:
        """The pid of the node's keeper. Raises ProcessLookupError if there is none."""
        with self._lock:
            keeper = self._nodes[name].keeper
        if keeper is None or keeper.pid is None:
            raise ProcessLookupError(f"node {name} has no keeper")
        return keeper.pid

    def drain_node(self, name: str, deadline_s: float) -> None:
        """A preemption notice: at ``deadline_s`` (unix) the node is killed."""
        with self._lock:
            self._nodes[name].draining = True
        self._post(NodeDraining(time.time(), name, deadline_s, "preemption notice"))

        def end() -> None:
            if not self._closed:
                self.kill_node(name)

        self._later(max(0.0, deadline_s - time.time()), end)

    def pid_of(self, worker: WorkerId) -> int | None:
        process = self._processes.get(worker)
        return process.pid if process else None

    def nodes(self) -> list[str]:
        """Names of those alive, oldest first."""
        with self._lock:
            return [name for name, node in self._nodes.items() if node.alive]

    def alive(self) -> list[WorkerId]:
        with self._lock:
            return [w for w, p in self._processes.items() if p.is_alive()]

    # ----------------------------------------------------------------- internals

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(after_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _post(self, event: Any) -> None:
        if self._inbox is not None and not self._closed:
            self._inbox(event)

    def _fill(self) -> None:
        """Starts workers on free slots, spread over nodes, until ``wanted`` are alive."""
        while not self._closed and len(self._processes) < self._wanted:
            free = [
                node
                for node in self._nodes.values()
                if node.alive and not node.draining and len(node.workers) < node.slots
                if time.monotonic() >= node.avoided_until_s
            ]
            if not free:
                return
            self._start_one(min(free, key=lambda node: len(node.workers)))

    def _start_one(self, node: LocalNode) -> None:
        worker = f"w{self._count}"
        self._count += 1
        gpu = one_gpu(worker, self._gpus, self._shown.values())
        self._shown[worker] = gpu.get(VISIBLE)
        self._processes[worker] = self._start(_worker_process, worker, node, gpu)
        node.workers.add(worker)

    def _start_keeper(self, node: LocalNode) -> None:
        if node.alive and not self._closed and node.keepers_left:
            node.keepers_left -= 1
            node.keeper = self._start(_keeper_process, f"keeper-{node.name}", node)

    def _start(
        self,
        target: Callable[..., None],
        name: str,
        node: LocalNode,
        gpu: dict[str, str] | None = None,
    ) -> BaseProcess:
        environment = dict(os.environ) | self.worker_environment | (gpu or {})
        process = self._context.Process(
            target=target,
            args=(self._address, self._key, name, node.name, environment, os.getpid()),
            name=name,
            daemon=True,
        )
        with _STARTING, worker_environment(self.worker_environment), no_main_module():
            process.start()
        return process

    def _watch(self) -> None:
        """Reaps ended processes at once, and replaces them."""
        while not self._closed:
            with self._lock:
                for node in self._nodes.values():
                    if node.keeper is not None and not node.keeper.is_alive():
                        node.keeper.join(1)
                        node.keeper = None
                        self._start_keeper(node)
                sentinels = {p.sentinel: w for w, p in self._processes.items()}
            if not sentinels:
                time.sleep(0.02)
                continue
            for sentinel in wait_any(list(sentinels), timeout=WATCH_EVERY_S):
                self._reap(sentinels[sentinel])  # type: ignore[index]

    def _reap(self, worker: WorkerId) -> None:
        with self._lock:
            process = self._processes.pop(worker, None)
            if process is None:
                return
            self._shown.pop(worker, None)
            process.join(1)
            for node in self._nodes.values():
                node.workers.discard(worker)
        end = _end_of(process.exitcode)
        self._post(WorkerLost(time.time(), worker, end))
        if not self._formed and process.exitcode:
            self._failures += 1
            if self._failures == START_FAILURES_MAX:  # it can't start here: trying on is pointless
                reason = f"{START_FAILURES_MAX} workers ended before any could train, {end}"
                self._post(WorkerRaised(time.time(), worker, 0, 0, reason, whose=EVERYONES))
        with self._lock:
            self._fill()


def start_fork_server(environment: dict[str, str] = ENVIRONMENT) -> bool:
    """Returns at once, whether one was started; does nothing where one runs already.

    Workers fork from a server that has imported torch and nothing else: 0.3 s, not 5 s. Who knows
    early that there will be workers has it import meanwhile.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["elastic_ft.worker.preload"])
    before = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with _STARTING, worker_environment(environment), no_main_module():
        resource_tracker.ensure_running()  # which unblocks the signal when it starts
        # While the server imports, it would die of the terminal's interrupt, with a traceback.
        before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before_mask)
    return bool(forkserver._forkserver._forkserver_pid != before)  # type: ignore[attr-defined]


def kill_fork_server() -> None:
    """At once, whatever it imports, and what multiprocessing started with it."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _kill(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it ended this very moment
            os.kill(process.pid, signal.SIGKILL)


def _end_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


@contextlib.contextmanager
def worker_environment(values: dict[str, str]) -> Iterator[None]:
    """For a process that is started inside: torch reads some of it when it is imported."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def no_main_module() -> Iterator[None]:
    """A process started inside does not import this one's main script: a worker has no use for it.

    It takes time, it fails for what is typed into an interpreter, and it starts the job once more
    for a script without ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _worker_process(
    address: tuple[str, int],
    key: JobKey,
    worker: str,
    node: str,
    environment: dict[str, str],
    parent: int,
) -> None:
    _follow(parent, environment)
    set_title(f"ef-worker {worker}")
    from elastic_ft.worker.worker import member_here, run_worker

    run_worker(address, key, member_here(worker, node, os.uname().nodename))


def _keeper_process(
    address: tuple[str, int],
    key: JobKey,
    name: str,
    node: str,
    environment: dict[str, str],
    parent: int,
) -> None:
    _follow(parent, environment, to_death=False)  # it saves what it has first, and ends
    set_title(f"ef-keeper {node}")
    from elastic_ft.keeper.keeper import run_keeper

    with contextlib.suppress(EOFError, OSError):  # the controller was gone before it was reached
        run_keeper(address, key, node, "127.0.0.1")


def _follow(controller_pid: int, environment: dict[str, str], to_death: bool = True) -> None:
    _die_with(controller_pid, to_death)
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # may reach the whole process group
        signal.signal(interrupt, signal.SIG_IGN)  # the controller decides how to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server's, see there
    os.environ.clear()  # the server's is of an earlier time
    os.environ.update(environment)


def _die_with(controller_pid: int, to_death: bool) -> None:
    """A stopped or hung worker can't see that its controller is gone: the kernel ends it.

    It does so when this process's parent ends, the fork server. That one ends when the last copy
    of a pipe's end is closed, the controller's: so the copy that workers are given is closed here.
    """
    alive_fd = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    os.close(alive_fd)
    if to_death and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(controller_pid, 0)
    except ProcessLookupError:  # it was faster
        os._exit(1)


def run_local(
    job: Job,
    out: str,
    *,
    nodes: dict[str, int] | None = None,
    faults: Sequence[PointFault] = (),
    on_step: Callable[[Any, dict[str, Any]], None] | None = None,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Runs ``job`` on plain processes. Returns what is in result.json.

    Args:
        out: the run folder.
        nodes: name -> slots; by default as many nodes as ``max_workers`` and spares need.
        faults: to inject at named points.
        on_step: called with (host, step line) after each committed step, in the controller's
            thread.
        accept_changes: go on from a checkpoint that was trained under other terms, or another name.
    """
    from elastic_ft.controller.controller import Controller

    elastic = job.elastic
    if nodes is None:
        count = -(-elastic.workers_wanted // elastic.workers_per_node)
        nodes = {f"n{i}": elastic.workers_per_node for i in range(count)}
    host = LocalHost(nodes)
    run = RunFolder(out)
    url = job.checkpoint.url or f"{run.url}/checkpoints"
    controller = Controller(job, host, run, url, faults=faults, accept_changes=accept_changes)
    if on_step is not None:
        controller.on_step = lambda line: on_step(host, line)
    return controller.run()
