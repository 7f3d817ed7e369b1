"""The simulated world: clock, network, host, record, and the controller with the real core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_ft.core.events import (
    AvoidNode,
    Bench,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRef,
    Command,
    CommitCheckpoint,
    DropKept,
    Event,
    FinishJob,
    FormGeneration,
    JobStarted,
    Journal,
    KillWorker,
    NobodyMoves,
    NodeLost,
    PauseWorkers,
    RecordStep,
    ReleaseWorker,
    ResizeRequested,
    RollBack,
    StartTimer,
    StopAtBoundary,
    TimerFired,
    UseKeeper,
    WantWorkers,
    WorkerHung,
    WorkerId,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.sim import checks
from elastic_ft.sim.group import Group
from elastic_ft.sim.kernel import Kernel
from elastic_ft.sim.nodes import Lineage, ObjectStore, SimCheckpoint
from elastic_ft.sim.scenario import SimScenario
from elastic_ft.sim.sim_emergency import Emergency
from elastic_ft.sim.sim_keeper import SimKeeper, SimNode
from elastic_ft.sim.sim_worker import SimWorker

STALL_TIMEOUT_S = 6.0
START_TIMEOUT_S = 20.0
KEPT_CHECKPOINTS = 2
TAKEN_OVER_S = 5.0  # a controller is followed by the next within so long

Decide = Callable[[State, Event, Policy], tuple[State, tuple[Command, ...]]]


class Simulation(Kernel):
    """Attributes:
    core: the state of the core, as of the last event.
    recorded: (step, generation that computed it), the lines of steps.jsonl.
    formed: the newest generation whose members all have their state.
    retain_live: workers keep the shards that a new cut was made from until that is held.
    hold_late: workers hold a snapshot of a generation that they have left when its copy ended.
    """

    def __init__(
        self, scenario: SimScenario, decide: Decide, retain_live: bool, hold_late: bool = False
    ) -> None:
        super().__init__(scenario)
        self.decide = decide
        self.retain_live, self.hold_late = retain_live, hold_late
        self.policy = scenario.policy.in_multiples()
        self.events = 0
        self.nodes = [SimNode(f"n{i}", scenario.workers_per_node) for i in range(scenario.nodes)]
        self.node_count = len(self.nodes)
        self._keepers = 0
        self.workers: dict[WorkerId, SimWorker] = {}
        self.groups: dict[int, Group] = {}
        self.store = ObjectStore()
        self.recorded: list[tuple[int, int]] = []
        self.flushed = 0  # lines that a crash of the controller can't tear
        self.rollbacks: list[tuple[int, int]] = []  # (from step, to step)
        self.formed = 0
        self.core = State()
        self.controller = 0  # how many have run; messages are for one of them
        self.up = False
        self.rescued: list[int] = []  # the steps gone on from, as keepers had saved them
        self.want = 0
        self.publishing: list[CommitCheckpoint] = []
        self.silenced: list[CommitCheckpoint] = []  # their outcome came late, or never
        self.stop_requested = False
        self.asked: int | None = None  # how many workers, until the job has ended
        self.finish: FinishJob | None = None
        self.on_turn: Callable[[], None] = lambda: None

    # ----------------------------------------------------------------------- network

    def send_up(self, worker: SimWorker, event: Event) -> None:
        """First in, first out per worker, except for what arrives twice."""
        if worker.cut_off:
            return
        worker.up_at_s = max(worker.up_at_s, self.now_s + self.latency())
        controller = self.controller

        def arrive() -> None:
            if worker.node.cut:
                worker.node.held.append(arrive)
            elif not worker.cut_off:
                self.tell(event, controller)

        self.at(worker.up_at_s, arrive)
        if self.rng.random() < self.duplicates:
            self.at(worker.up_at_s + self.twice_after_s(), arrive)

    def send_down(self, name: WorkerId, message: Any) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            return
        worker.down_at_s = max(worker.down_at_s, self.now_s + self.latency())

        def arrive() -> None:
            if worker.node.cut:
                worker.node.held.append(arrive)
            else:
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
                worker.send(WorkerReady(self.now_s, worker.member))

        def overdue() -> None:
            if not worker.ready:
                self.kill(worker, "not ready in time")

        self.after(self.rng.uniform(1.0, 4.0), ready)
        self.after(START_TIMEOUT_S, overdue)

    def kill(self, worker: SimWorker, why: str, *, with_node: bool = False) -> None:
        """The process ends; two observers tell, in any order."""
        if not worker.alive:
            return
        worker.alive = False
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

    def watch_stall(self, group: Group) -> None:
        """The controller's watch: nobody moves, and nobody says why."""

        def look() -> None:
            if self.core.phase == "running" and self.core.generation == group.generation:
                event = NobodyMoves(self.now_s, group.generation, "nobody moves")
                self.tell(event, self.controller)
                self.after(STALL_TIMEOUT_S, look)

        self.after(STALL_TIMEOUT_S, look)

    # -------------------------------------------------------------------- controller

    def take_over(self) -> None:
        """A controller has the job: no older one's word counts any more."""
        self.controller += 1
        self.store.take_over(self.controller)

    def start_controller(self) -> None:
        """State is lost with a controller; what is published and recorded is not."""
        generation = max([0, *self.groups])
        self.up, self.core = True, State()
        within = [c for c in self.store.good() if c.step <= len(self.recorded)]
        refs = tuple(CheckpointRef(c.step, c.url, c.lineage[-1]) for c in reversed(within))
        refs = tuple(sorted(refs, key=lambda ref: -ref.step))
        recorded = len(self.recorded)
        if refs or self.policy.from_scratch:
            self.recorded = self.recorded[: refs[0].step if refs else 0]
        self.flushed = len(self.recorded)
        for node in self.nodes:
            self.start_keeper(node)
        self.tell(JobStarted(self.now_s, refs, generation, recorded), self.controller)
        if self.asked is not None:
            self.ask_for(self.asked)

    def ask_for(self, workers: int) -> None:
        self.asked = workers
        self.tell(ResizeRequested(self.now_s, workers, f"r{self.events}"), self.controller)

    def crash_controller(self) -> None:
        """Workers leave when their controller does. The last line may be torn, a PUT half done."""
        if not self.up or self.finish is not None:
            return
        self.up, self.want = False, 0
        for command in self.publishing:
            if self.rng.random() < 0.5:
                self._publish(command)
        self.publishing = []
        if len(self.recorded) > self.flushed and self.rng.random() < 0.5:
            self.recorded.pop()
        for worker in self.alive():
            self.kill(worker, "its controller is gone")
        emergency = Emergency(self)
        for node in self.nodes:  # keepers leave, too, once they have saved what they have
            if node.keeper is not None:
                emergency.save(node)
                node.keeper.die()
        self.after(self.rng.uniform(1.0, 5.0), emergency.end)

    def tell(self, event: Event, controller: int) -> None:
        if not self.up or controller != self.controller or self.finish is not None:
            return
        self.events += 1
        self.core, commands = self.decide(self.core, event, self.policy)
        self.note(repr(event))
        for command in commands:
            self.note(repr(command))
            self._execute(command)
        self.on_turn()

    def _execute(self, command: Command) -> None:
        match command:
            case WantWorkers(total=total):
                self.want = total
                self.fill()
            case AvoidNode(node=at, for_s=for_s):
                for node in self.nodes:
                    if node.id == at:
                        node.avoided_until_s = self.now_s + for_s
                self.after(for_s, self.fill)
            case KillWorker(worker=name):
                self._kill_from_afar(self.workers[name])
            case ReleaseWorker(worker=name) | Bench(worker=name) | UseKeeper(worker=name):
                self.send_down(name, command)
            case DropKept(node=at, worker=name):
                for node in self.nodes:
                    if node.id == at and node.keeper is not None:
                        node.keeper.drop(name)
            case PauseWorkers(workers=names) | StopAtBoundary(workers=names):
                checks.require(bool(command.reason), "I8", f"no reason: {command}")
                for name in names:
                    self.send_down(name, command)
            case FormGeneration(assignment=new):
                checks.require(bool(new.reason), "I8", f"no reason: {command}")
                checks.world_is_allowed(self, new)
                self.groups[new.generation] = Group(self, new)
                for member in (*new.members, *new.donors):
                    self.send_down(member.worker, command)
            case RecordStep():
                checks.recorded(self, command)
                self.recorded.append((command.step, command.generation))
            case RollBack(step=step):
                checks.rolled_back(self, command)
                self.rollbacks.append((len(self.recorded), step))
                self.recorded = self.recorded[:step]
                self.flushed = min(self.flushed, step)
            case CommitCheckpoint():
                self._commit(command)
            case StartTimer(timer=name, generation=generation, after_s=after_s):
                self._start_timer(name, generation, after_s)
            case FinishJob(status=status, reason=reason):
                self.finish = command
                checks.finished(self, status, reason)
            case Journal(reason=reason):
                checks.require(bool(reason), "I8", f"no reason: {command}")
                if command.event == "worker_left_out":
                    checks.left_out(self, command.fields["worker"], reason)
                if command.event == "generation_formed":
                    checks.formed(self, self.groups[command.generation])

    def _kill_from_afar(self, worker: SimWorker) -> None:
        if not worker.alive:
            return

        def act() -> None:
            if worker.node.cut:
                self.after(1.0, act)
            else:
                self.kill(worker, "killed")

        self.after(self.rng.uniform(0.01, 0.3), act)

    def _start_timer(self, name: str, generation: int, after_s: float) -> None:
        controller = self.controller

        def fire() -> None:
            if name == "keeper" and generation == self.core.generation:
                self._stop_waiting()
            self.tell(TimerFired(self.now_s, name, generation), controller)

        self.after(after_s, fire)

    def _stop_waiting(self) -> None:
        """What keepers have not told by now comes too late."""
        for node in self.nodes:
            for left in node.keeper.left.values() if node.keeper else ():
                left.void = left.void or not left.told

    # -------------------------------------------------------- what a group has looked at

    def true_source(self, group: Group) -> Lineage:
        return checks.source(self, group)

    def look_at_applied(self, worker: SimWorker, group: Group, step: int) -> None:
        checks.applied(self, worker, group, step)

    # ------------------------------------------------------------------------- store

    def _commit(self, command: CommitCheckpoint) -> None:
        self.flushed = len(self.recorded)  # lines first, then what refers to them
        self.publishing.append(command)
        controller = self.controller

        def done() -> None:
            if controller != self.controller or command not in self.publishing:
                return
            if self.store.silent and not self.silenced.count(command):
                self.silenced.append(command)
                if self.rng.random() < 0.5:  # else nobody ever hears of it
                    self.after(self.rng.uniform(20.0, 100.0), done)
                return
            self.publishing.remove(command)
            if self.store.down:
                self.tell(CheckpointFailed(self.now_s, command.step, "down"), controller)
            else:
                url = self._publish(command)
                self.tell(CheckpointCommitted(self.now_s, command.step, url, 1, 0.1), controller)

        self.after(self.rng.choice((0.1, self.rng.uniform(0.1, 5.0))), done)

    def _publish(self, command: CommitCheckpoint) -> str:
        lineage = checks.published(self, command)
        url = f"mem://{command.step}-{command.generation}-{self.controller}"
        self.store.published.append(SimCheckpoint(command.step, url, lineage, self.controller))
        newest = sorted(self.store.good(), key=lambda c: c.step)[-KEPT_CHECKPOINTS:]
        self.store.published = newest
        return url

    def stop_controller(self, lasts_s: float) -> bool:
        """It is stopped for so long that another takes the job. Then it wakes up.

        It finishes the write that it was at, as it had looked for a newer owner before; whatever
        comes after that it does not begin. Its workers play no part: what they do is its alone.
        """
        if not self.up or self.finish is not None:
            return False
        writing, number = self.publishing[:1], self.controller
        self.publishing = []
        self.crash_controller()
        self.after(lasts_s + TAKEN_OVER_S, lambda: self._wake(writing, number))
        return True

    def _wake(self, writing: list[CommitCheckpoint], number: int) -> None:
        for command in writing:
            lineage = command.shards[0]["lineage"]
            url = f"mem://{command.step}-{command.generation}-{number}"
            self.store.published.append(SimCheckpoint(command.step, url, lineage, number))
            self.note(f"controller {number} wakes up and publishes {url}")
