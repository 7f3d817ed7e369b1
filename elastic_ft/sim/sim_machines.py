"""The simulated machines: nodes with their workers and keepers, the network between, the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from elastic_ft.core.assignment import WorkerId
from elastic_ft.core.commands import FinishJob
from elastic_ft.core.events import (
    Event,
    NobodyMoves,
    NodeLost,
    WorkerHung,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic_ft.core.state import State
from elastic_ft.sim.group import Group
from elastic_ft.sim.kernel import Kernel
from elastic_ft.sim.nodes import HANG_TIMEOUT_S, ObjectStore
from elastic_ft.sim.scenario import SimScenario
from elastic_ft.sim.sim_keeper import SimKeeper, SimNode
from elastic_ft.sim.sim_worker import SimWorker

STALL_TIMEOUT_S = 6.0
EXPERTS = 7  # of each layer, where ranks share them out
START_TIMEOUT_S = 20.0
UNHEARD = "its first call found nobody"


class Machines(Kernel, ABC):
    """What the controller sees of it, it is told (``tell``).

    Attributes:
        core: the state of the controller's core, as of the last event.
        controller: how many have run; messages are for one of them.
        up: it is there.
        want: workers to keep alive.
        ends: of workers, by why.
    undone: corrections of the real worker that the simulated one is without.
    """

    def __init__(self, scenario: SimScenario) -> None:
        super().__init__(scenario)
        self.policy = scenario.policy.in_multiples()
        self.undone: frozenset[str] = frozenset()
        self.nodes = [SimNode(f"n{i}", scenario.workers_per_node) for i in range(scenario.nodes)]
        self.node_count = len(self.nodes)
        self._keepers = 0
        self.workers: dict[WorkerId, SimWorker] = {}
        self.groups: dict[int, Group] = {}
        self.store = ObjectStore()
        self.core = State()
        self.controller = 0
        self.up = False
        self.want = 0
        self.ends: Counter[str] = Counter()
        self.finish: FinishJob | None = None

    @abstractmethod
    def tell(self, event: Event, controller: int, sender: WorkerId = "", number: int = 0) -> None:
        """``number``: the sender's, of what it told."""

    @property
    @abstractmethod
    def trains_alone(self) -> bool:
        """There is no controller, and there will be one that adopts."""

    # ----------------------------------------------------------------------- network

    def send_up(self, worker: SimWorker, event: Event, number: int = 0) -> None:
        """First in, first out per worker, except for what arrives twice."""
        if worker.cut_off or worker.outbox.epoch != self.controller:
            return
        worker.up_at_s = max(worker.up_at_s, self.now_s + self.latency())
        controller = self.controller

        def arrive() -> None:
            if worker.node.cut:
                worker.node.held.append(arrive)
            elif not worker.cut_off:
                self.tell(event, controller, worker.id, number)

        self.at(worker.up_at_s, arrive)
        if self.rng.random() < self.duplicates:
            self.at(worker.up_at_s + self.twice_after_s(), arrive)

    def send_down(self, name: WorkerId, message: Any, controller: int) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.alive or worker.outbox.epoch != controller:
            return
        worker.down_at_s = max(worker.down_at_s, self.now_s + self.latency())

        def arrive() -> None:
            if worker.node.cut:
                worker.node.held.append(arrive)
            elif worker.outbox.epoch == controller:  # else it has another one by now
                worker.receive(message)

        self.at(worker.down_at_s, arrive)

    def heal_cut(self, node: SimNode) -> None:
        node.cut, held = False, node.held
        node.held = []
        for arrive in held:
            arrive()
        self.fill()
        if node.lost:  # the host kills what it could not reach
            self.kill_keeper(node)
            for worker in self.on(node):
                self.after(self.rng.uniform(0.1, 3.0), lambda w=worker: self.kill(w, "was lost"))  # type: ignore[misc]

    # ----------------------------------------------------------------------- keepers

    def count_keeper(self) -> int:
        self._keepers += 1
        return self._keepers

    def start_keeper(self, node: SimNode) -> None:
        """An empty one, where none is alive."""
        alive = node.keeper is not None and node.keeper.alive
        if self.scenario.keepers and self.up and self._may_start_on(node) and not alive:
            node.keeper = SimKeeper(self, node)

    def kill_keeper(self, node: SimNode) -> None:
        """It is started again soon."""
        if node.keeper is not None and node.keeper.alive:
            node.keeper.die()
            self.after(self.rng.uniform(0.3, 3.0), lambda: self.start_keeper(node))

    def keeper_of(self, holder: str) -> tuple[SimKeeper | None, WorkerId]:
        """Who serves what a source names so, and whose it is."""
        name, _, worker = holder.rpartition("/")
        keepers = (node.keeper for node in self.nodes if node.keeper is not None)
        return next((k for k in keepers if k.keeper.name == name), None), worker

    # ------------------------------------------------------------------------- nodes

    def on(self, node: SimNode) -> list[SimWorker]:
        return [w for w in self.workers.values() if w.alive and w.node is node]

    def alive(self) -> list[SimWorker]:
        return [w for w in self.workers.values() if w.alive]

    def members(self) -> list[SimWorker]:
        """The living members of the core's world, in rank order."""
        ranks = self.core.ranks
        return [
            self.workers[w] for w in sorted(ranks, key=ranks.__getitem__) if self.workers[w].alive
        ]

    def fill(self) -> None:
        """Starts workers up to ``want``, where there is room."""
        if self.trains_alone:
            return
        missing = self.want - sum(not w.node.lost and not w.released for w in self.alive())
        for node in self.nodes:
            if self.now_s < node.avoided_until_s:
                continue
            while missing > 0 and len(self.on(node)) < node.slots and self._may_start_on(node):
                self._start(node)
                missing -= 1

    def _may_start_on(self, node: SimNode) -> bool:
        return node.up and not node.draining and not node.cut and not node.lost

    def _start(self, node: SimNode) -> None:
        worker = SimWorker(self, f"w{len(self.workers) + 1}", node)
        self.workers[worker.id] = worker

        def ready() -> None:
            if worker.works() and node.spoiled and self.core.assignment is not None:
                error = "DataError: no such mount"
                raised = WorkerRaised(self.now_s, worker.id, 0, 0, error, usage=True, node=node.id)
                worker.send(raised)
                self.after(0.05, lambda: self.kill(worker, "exited with code 1"))
            elif worker.works():
                worker.ready = True
                worker.send(WorkerReady(self.now_s, worker.member, experts=EXPERTS))

        def call() -> None:
            if not self.up or self.controller != worker.outbox.epoch:
                self.kill(worker, UNHEARD)
            worker.has_called = worker.works()

        def overdue() -> None:
            if not worker.ready:
                self.kill(worker, "not ready in time")

        ready_s = self.rng.uniform(1.0, 4.0)
        self.after(ready_s / 2, call)
        self.after(ready_s, ready)
        self.after(START_TIMEOUT_S, overdue)

    def kill(self, worker: SimWorker, why: str, *, with_node: bool = False) -> None:
        """The process ends; two observers tell, in any order."""
        if not worker.alive:
            return
        worker.alive = False
        self.ends[why] += 1
        if worker.keeper is not None and worker.keeper.alive:
            worker.keeper.inherit(worker.id, worker.copies, worker.record)
        lost = WorkerLost(self.now_s, worker.id, why)
        controller = self.controller
        slow_s = 3.0 if with_node else 0.1
        if with_node and self.rng.random() < 0.5:
            worker.cut_off = True  # what was on its way is gone with the machine
        self.send_up(worker, lost)
        self.after(self.rng.uniform(0.01, slow_s), lambda: self.tell(lost, controller))
        if worker.group is not None:
            self.after(self.rng.uniform(0, 0.02), lambda g=worker.group: g.fail("a peer is gone"))  # type: ignore[misc]
        self.after(self.rng.uniform(0.1, 2.0), self.fill)

    def lose_node(self, node: SimNode, why: str) -> None:
        node.up = False
        self.kill_keeper(node)
        for worker in self.on(node):
            self.kill(worker, why, with_node=True)
        self.after(self.rng.uniform(0.5, 8.0), lambda: self._tell_node_lost(node, why))

    def _tell_node_lost(self, node: SimNode, why: str) -> None:
        if node.up and not node.cut:
            return  # it was too short for anyone to notice
        node.lost = True
        self.tell(NodeLost(self.now_s, node.id, why), self.controller)
        self.after(self.rng.uniform(0.1, 2.0), self.fill)

    def bring_node(self) -> None:
        """A new node: an id is never used again."""
        if sum(n.up and not n.lost and not n.draining for n in self.nodes) < self.node_count:
            self.nodes.append(SimNode(f"n{len(self.nodes)}", self.scenario.workers_per_node))
            self.start_keeper(self.nodes[-1])
            self.fill()

    def cut_node(self, node: SimNode) -> None:
        node.cut = True
        for group in {id(w.group): w.group for w in self.on(node) if w.group}.values():
            if not group.connected():
                self.after(self.rng.uniform(0.01, 3.0), lambda g=group: g.fail("a link is cut"))  # type: ignore[misc]
        self.after(self.rng.uniform(1.0, 6.0), lambda: self._tell_node_lost(node, "unreachable"))

    def watch_hung(self, worker: SimWorker) -> None:
        """The controller's watch: silence of a member while running is a hang."""
        if not worker.alive or self.finish is not None:
            return
        if self.up and self.core.phase == "running" and worker.id in self.core.ranks:
            self.tell(WorkerHung(self.now_s, worker.id, "nothing heard"), self.controller)
        self.after(1.0, lambda: self.watch_hung(worker))

    def watch_silent(self, worker: SimWorker, is_silent: Callable[[], bool]) -> None:
        """The same, of one that is well: whatever it waits for."""

        def look() -> None:
            if not worker.works() or not is_silent() or self.finish is not None:
                return
            if self.up and self.core.phase == "running" and worker.id in self.core.ranks:
                self.tell(WorkerHung(self.now_s, worker.id, "nothing heard"), self.controller)
            self.after(1.0, look)

        self.after(HANG_TIMEOUT_S, look)

    def watch_stall(self, group: Group) -> None:
        """The controller's watch: nobody moves, and nobody says why."""

        def look() -> None:
            if self.core.phase == "running" and self.core.generation == group.generation:
                event = NobodyMoves(self.now_s, group.generation, "nobody moves")
                self.tell(event, self.controller)
                self.after(STALL_TIMEOUT_S, look)

        self.after(STALL_TIMEOUT_S, look)
