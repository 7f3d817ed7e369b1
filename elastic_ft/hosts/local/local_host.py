"""Worker processes on virtual nodes of this machine, as the controller sees them.

A node is a name and a number of slots. Killing a node kills its workers. Who forks, and tells how
each process ends, is the launcher (``launcher``); if it is gone, another one is started here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elastic_ft.controller.host import Tell
from elastic_ft.core.assignment import KEEPER, Assignment, NodeId, WorkerId
from elastic_ft.core.events import EVERYONES, NodeDraining, NodeLost, WorkerLost, WorkerRaised
from elastic_ft.hosts.keeper_lives import KeeperLives
from elastic_ft.hosts.local import orders
from elastic_ft.hosts.local.to_launcher import ToLauncher
from elastic_ft.hosts.local.warm import start_warm
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.devices import VISIBLE, gpus_of_machine, one_gpu

START_FAILURES_MAX = 5  # before any worker has trained: then the job can't start here
TOLD_S = 0.2  # without news of processes that should end, one looks for them
END_S = 10.0  # for a process that was killed to be gone


@dataclass(slots=True)
class LocalNode:
    name: str
    slots: int
    alive: bool = True
    draining: bool = False
    ends_at_s: float = 0.0  # unix; of one that is draining
    avoided_until_s: float = 0.0  # on the monotonic clock
    workers: set[WorkerId] = field(default_factory=set)
    keeper: LocalProcess | None = None
    keepers: KeeperLives = field(default_factory=KeeperLives)


@dataclass(slots=True, eq=False)
class LocalProcess:
    """``forked``: by the launcher; its pid is 0 until that has forked it. ``killed``: by us."""

    forked: orders.Forked
    killed: bool = False

    @property
    def pid(self) -> int | None:
        return self.forked.pid or None

    def is_alive(self) -> bool:
        return not self.forked.ended and (not self.forked.pid or orders.lives(self.forked))


class LocalHost:
    """Worker processes on virtual nodes.

    Args:
        nodes: name -> slots.
        launched: the order of the launcher that has started this very process; None: the host
            has a launcher of its own, which ends with this process.
    """

    successor_within_s = 0.0  # who starts it (``guard``) makes signs

    def __init__(self, nodes: dict[str, int], launched: orders.Order | None = None) -> None:
        self._nodes = {name: LocalNode(name, slots) for name, slots in nodes.items()}
        self._processes: dict[WorkerId, LocalProcess] = {}
        self._all: dict[str, LocalProcess] = {}  # ended ones too
        self._gpus = gpus_of_machine()
        self._shown: dict[WorkerId, str | None] = {}  # the GPU of each that is alive
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = self._count = self._keepers = 0
        self._timers: list[threading.Timer] = []
        self._closed = self._adopts = False
        self._formed = False  # some workers have trained here
        self._failures = 0  # of workers, before any has
        self._inbox: Tell | None = None
        self._address: tuple[str, int] = ("", 0)
        self._key = JobKey(b"")
        self._launched = launched is not None
        self._line = ToLauncher(self, launched)
        if self._launched:
            self._join()

    # ------------------------------------------------------------------ Host

    def survivors(self) -> frozenset[WorkerId]:
        found = set()
        with self._lock:
            self._adopts = True
            for process in self._all.values():
                if not process.is_alive():
                    continue
                if process.forked.kind == "keeper":
                    if node := self._nodes.get(process.forked.node):
                        node.keeper = process
                    found.add(KEEPER + process.forked.node)
                elif process.forked.kind == "worker":
                    found.add(process.forked.name)
        return frozenset(found)

    def start(self, inbox: Tell, address: tuple[str, int], key: JobKey) -> None:
        self._inbox, self._address, self._key = inbox, address, key
        if not self._launched:
            start_warm()
        with self._lock:
            for process in () if self._adopts else self._processes.values():
                self._kill(process)  # nobody waits for those of an earlier controller
            for node in self._nodes.values():
                if not node.alive:  # the controller before this one may have died of the news
                    self._post(NodeLost(time.time(), node.name, "the node was killed"))
                elif node.keeper is None:
                    self._start_keeper(node)

    def want_workers(self, total: int) -> None:
        with self._lock:
            self._wanted = total
            self._fill()

    def use_places(self, places: dict[NodeId, int]) -> None:
        """Nobody shares a machine out to jobs: its nodes are names, and this run's alone."""

    def avoid_node(self, node: NodeId, for_s: float) -> None:
        with self._lock:
            self._nodes[node].avoided_until_s = time.monotonic() + for_s
        self._later(for_s, self._fill_again)

    def _fill_again(self) -> None:
        with self._lock:
            self._fill()

    def kill_worker(self, worker: WorkerId) -> None:
        with self._lock:
            self._kill(self._processes.get(worker))

    def kill_keeper(self, node: NodeId) -> None:
        with self._lock:
            self._kill(self._nodes[node].keeper)

    def prepare(self, assignment: Assignment) -> dict[WorkerId, dict[str, Any]]:
        return {}

    def formed(self, assignment: Assignment) -> None:
        self._formed = True

    def close(self, keepers_s: float = 0.0) -> None:
        with self._lock:
            self._closed, self._wanted = True, 0
            keepers = [node.keeper for node in self._nodes.values() if node.keeper is not None]
            workers = list(self._processes.values())
            for process in workers:
                self._kill(process)
        for timer in self._timers:
            timer.cancel()
        self._await_ends(keepers, keepers_s)
        with self._lock:
            for keeper in keepers:
                self._kill(keeper)
        self._await_ends([*workers, *keepers], END_S)
        if not self._launched:
            self._line.depart()

    def leave(self) -> None:
        with self._lock:
            self._closed, self._wanted = True, 0
            if self._line.is_there:
                self._ask(orders.LeaveAlone())
        for timer in self._timers:
            timer.cancel()
        if not self._launched:
            self._line.depart()

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
            self._kill(node.keeper)
            for worker in list(node.workers):
                self.kill_worker(worker)
            self._keep_nodes()

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
            self._nodes[name].ends_at_s = deadline_s
            self._keep_nodes()
        self._post(NodeDraining(time.time(), name, deadline_s, "preemption notice"))
        self._end_node_in_time(name)

    def _end_node_in_time(self, name: str) -> None:
        def end() -> None:
            if not self._closed:
                self.kill_node(name)

        self._later(max(0.0, self._nodes[name].ends_at_s - time.time()), end)

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

    # ------------------------------------------------- of a controller that was launched

    def trained(self) -> None:
        """A step was committed: should this controller end, it was not in vain."""
        self._line.trained = True

    def depart(self, outcome: orders.RunEnded) -> None:
        """The launcher is to start no controller after this one."""
        self._closed = True
        self._line.depart(outcome)

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
        node.workers.add(worker)
        self._processes[worker] = self._start("worker", worker, node, gpu)

    def _start_keeper(self, node: LocalNode) -> None:
        self._keep_nodes()  # first: a successor is to know the node of each process
        if node.alive and node.keeper is None and not self._closed:
            self._keepers += 1
            node.keepers.begin()
            node.keeper = self._start("keeper", f"keeper{self._keepers}", node, {})

    def _start(
        self, kind: orders.Kind, name: str, node: LocalNode, gpu: dict[str, str]
    ) -> LocalProcess:
        shown = gpu.get(VISIBLE)
        process = self._all[name] = LocalProcess(orders.Forked(name, kind, node.name, 0, 0, shown))
        self._ask(orders.StartProcess(name, kind, node.name, self._address, self._key, shown, gpu))
        return process

    def _kill(self, process: LocalProcess | None) -> None:
        """By the launcher, unless it is gone: it obeys none that is superseded."""
        if process is None or process.forked.ended:
            return
        process.killed = process.killed or not orders.is_ending(process.forked)
        if not self._ask(orders.KillProcess(process.forked.name)):
            orders.kill_directly(process.forked)

    def _keep_nodes(self) -> None:
        if self._line.is_there:
            self._ask(orders.KeepNodes(self._noted_nodes()))

    def _noted_nodes(self) -> dict[str, Any]:
        kept = ("slots", "alive", "draining", "ends_at_s")
        return {name: {k: getattr(node, k) for k in kept} for name, node in self._nodes.items()}

    def _await_ends(self, processes: Iterable[LocalProcess], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        with self._lock:
            while any(process.is_alive() for process in processes):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(min(left_s, TOLD_S))

    # ------------------------------------------------------------------- the launcher

    def _ask(self, message: Any) -> bool:
        return self._line.ask(message)

    def _join(self) -> None:
        """Of the launcher that has forked this process. Raises OSError, EOFError."""
        table = self._line.join()
        with self._lock:
            for name, kept in table.nodes.items():
                node = self._nodes[name] = LocalNode(name, **kept)
                if node.draining and node.alive:
                    self._end_node_in_time(name)
            for forked in table.forked:
                self._know(forked)

    def _know(self, forked: orders.Forked) -> None:
        """A process of the controller before this one."""
        process = self._all[forked.name] = LocalProcess(forked)
        if forked.kind == "keeper":
            self._keepers = max(self._keepers, orders.number_of(forked.name))
        if forked.kind != "worker":
            return
        self._count = max(self._count, orders.number_of(forked.name) + 1)
        if not forked.ended:
            self._processes[forked.name] = process
            self._nodes[forked.node].workers.add(forked.name)
            self._shown[forked.name] = forked.gpu

    def known(self) -> tuple[tuple[orders.Forked, ...], dict[str, Any]]:
        with self._lock:
            forked = tuple(process.forked for process in self._all.values())
            return forked, self._noted_nodes()

    def hear(self, message: Any) -> None:
        match message:
            case orders.ProcessTable():
                for forked in message.forked:
                    if forked.ended:
                        self._on_end(forked)
            case orders.ProcessStarted():
                with self._lock:
                    self._all[message.forked.name].forked = message.forked
                    self._changed.notify_all()
            case orders.ProcessEnded():
                self._on_end(message.forked)
            case orders.NodeRequest():
                self._do_to_node(message)

    def lost_unborn(self, forked: orders.Forked) -> None:
        self._on_end(replace(forked, ended=True))

    def gave_up(self, reason: str) -> None:
        self._post(WorkerRaised(time.time(), "w0", 0, 0, reason, whose=EVERYONES))

    def _do_to_node(self, asked: orders.NodeRequest) -> None:
        if asked.what == "add":
            self.add_node(asked.node)
        elif asked.node in self._nodes and asked.what == "kill":
            self.kill_node(asked.node)
        elif asked.node in self._nodes:
            self.drain_node(asked.node, asked.deadline_s)

    def _on_end(self, forked: orders.Forked) -> None:
        with self._lock:
            process = self._all.get(forked.name)
            if process is None or process.forked.ended:
                return
            process.forked = forked
            self._all[forked.name] = self._all.pop(forked.name)  # its place is that of its end
            self._changed.notify_all()
            told = orders.worth_telling(one.forked for one in self._all.values())
            self._all = {one.name: self._all[one.name] for one in told}
            if forked.kind == "keeper":
                self._keeper_ended(process)
                return
            if forked.kind != "worker" or self._processes.pop(forked.name, None) is None:
                return
            self._shown.pop(forked.name, None)
            for node in self._nodes.values():
                node.workers.discard(forked.name)
        self._worker_ended(process)
        with self._lock:
            self._fill()

    def _keeper_ended(self, keeper: LocalProcess) -> None:
        for node in self._nodes.values():
            if node.keeper is keeper:
                node.keeper = None
                if pause_s := node.keepers.end():
                    self._later(pause_s, partial(self._start_keeper_again, node))
                else:
                    self._start_keeper(node)

    def _start_keeper_again(self, node: LocalNode) -> None:
        with self._lock:
            self._start_keeper(node)

    def _worker_ended(self, process: LocalProcess) -> None:
        forked = process.forked
        worker, end = forked.name, orders.end_in_words(forked)
        self._post(WorkerLost(time.time(), worker, end, asked=process.killed))
        if not self._formed and forked.code != 0:
            self._failures += 1
            if self._failures == START_FAILURES_MAX:  # it can't start here: trying on is pointless
                reason = f"{START_FAILURES_MAX} workers ended before any could train, {end}"
                self._post(WorkerRaised(time.time(), worker, 0, 0, reason, whose=EVERYONES))
