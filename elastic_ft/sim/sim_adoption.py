"""How a simulated controller goes while its workers train on, and how the next one adopts them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import WorkerId
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.sim.checks import require
from elastic_ft.sim.kernel import Clock
from elastic_ft.sim.nodes import ObjectStore, SimCheckpoint
from elastic_ft.sim.scenario import SimKill, SimScenario
from elastic_ft.sim.sim_inbox import Decide, InboxLine, SimInbox
from elastic_ft.sim.sim_keeper import SimKeeper, SimNode
from elastic_ft.sim.sim_worker import SimWorker

CALLS_WITHIN_S = 0.3  # of the next controller's start
CALLS_AGAIN_S = 0.25  # who can't reach it
STORE_POLL_S = 0.5
START_TIMEOUT_S = 20.0
ALONE_S = 60.0  # that a worker trains on for without a controller


class AdoptedWorld(Clock, Protocol):
    scenario: SimScenario
    policy: Policy
    decide: Decide
    core: State
    store: ObjectStore
    controller: int
    up: bool
    stop_requested: bool
    asked: int | None
    recorded: list[tuple[int, int]]
    rollbacks: list[tuple[int, int]]
    nodes: list[SimNode]

    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]: ...
    @property
    def is_finished(self) -> bool: ...
    def tell(self, event: ev.Event, controller: int) -> None: ...
    def send_up(self, worker: SimWorker, event: ev.Event, number: int = 0) -> None: ...
    def do(self, command: cmd.Command, controller: int) -> None: ...
    def arm(self, name: str, generation: int, due_s: float) -> None: ...
    def ask_for(self, workers: int) -> None: ...
    def kill(self, worker: SimWorker, why: str) -> None: ...
    def lose_node(self, node: SimNode, why: str) -> None: ...
    def leave_store(self) -> None: ...
    def take_over(self) -> None: ...
    def start_controller(self) -> None: ...
    def note(self, what: str) -> None: ...


@dataclass(slots=True)
class SimAdoption:
    """Attributes:
    kills: that are still to come.
    done: how often each kind of end was adopted after.
    phases: of the core, as its controller went.
    refused: lines that a controller which woke up would have written.
    """

    world: AdoptedWorld
    inbox: SimInbox = field(default_factory=SimInbox)
    kills: list[SimKill] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    phases: list[str] = field(default_factory=list)
    refused: int = 0
    is_pending: bool = False
    told: int = 0  # lines, in all
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"adoption {self.world.scenario.seed}")
        self.kills = sorted(self.world.scenario.kills, key=lambda kill: kill.at_line)

    def begin(self) -> None:
        """A controller that adopts nobody."""
        self.inbox = SimInbox(list(self.world.recorded))

    # ---------------------------------------------------------------------- each line

    def take(self, event: ev.Event, sender: WorkerId, number: int) -> bool:
        """Returns False if it was told before."""
        if not self.inbox.is_new(sender, number):
            return False
        self.inbox.write(InboxLine(event, sender, number))
        self.told += 1
        lines, inbox, controller = len(self.inbox.lines), self.inbox, self.world.controller
        self.world.after(
            self.rng.uniform(0.001, 0.05), lambda: self._sync(inbox, lines, controller)
        )
        return True

    def _sync(self, inbox: SimInbox, lines: int, controller: int) -> None:
        if controller != self.world.controller or not self.world.up or lines <= inbox.durable:
            return
        for command in inbox.synced(lines):
            self.world.do(command, controller)
        for name, number in inbox.acknowledged().items():
            self.world.workers[name].outbox.acknowledge(number)

    def carry_out(self, commands: tuple[cmd.Command, ...]) -> None:
        """All of it, or what the controller comes to before it goes."""
        controller, kill = self.world.controller, self._due()
        now = self.inbox.may_do(commands)
        first = round(kill.share * len(now)) if kill is not None else len(now)
        for command in now[:first]:
            self.world.do(command, controller)
        if kill is not None and not self.go(kill, now[first:]):
            for command in now[first:]:
                self.world.do(command, controller)

    def _due(self) -> SimKill | None:
        if self.kills and self.kills[0].at_line <= self.told and not self.world.is_finished:
            return self.kills.pop(0)
        return None

    # ------------------------------------------------------------------------- it goes

    def go(self, kill: SimKill, undone: tuple[cmd.Command, ...] = ()) -> bool:
        """Returns False if there is no controller to go."""
        world = self.world
        if not world.up or world.is_finished:
            return False
        node = self._its_node() if kill.how == "lost" else None
        if kill.how == "lost" and node is None:
            return False
        world.up, self.is_pending, number = False, True, world.controller
        self.phases.append(world.core.phase)
        self.done[kill.how] += 1
        world.note(f"controller {number} is {kill.how}")
        world.leave_store()
        if node is not None:
            self.inbox.cut()
            world.lose_node(node, "power")
        if kill.how == "stopped":
            world.after(kill.after_s + kill.wakes_s, lambda: self._wake(undone, number))
        world.after(kill.after_s, lambda: self._adopt(kill))
        world.after(ALONE_S, lambda: self._leave_alone(number))
        return True

    def _its_node(self) -> SimNode | None:
        """The controller's, if others are left."""
        there = [node for node in self.world.nodes if node.up and not node.cut and not node.lost]
        return there[-self.world.controller % len(there)] if len(there) > 1 else None

    def _leave_alone(self, number: int) -> None:
        """Whoever has found no other controller for so long ends."""
        for worker in list(self.world.workers.values()):
            if worker.works() and worker.outbox.epoch <= number:
                self.world.kill(worker, "without a controller")

    def _wake(self, undone: tuple[cmd.Command, ...], number: int) -> None:
        """It goes on where it was stopped: at commands that it had not come to. What it would
        write, it may not; whom it sends something, has another controller, or will have."""
        world = self.world
        world.note(f"controller {number} wakes up")
        for command in undone:
            match command:
                case (
                    cmd.RecordStep()
                    | cmd.RollBack()
                    | cmd.AbandonCheckpoint()
                    | cmd.Journal()
                    | cmd.FinishJob()
                ):
                    if world.store.may_write(number):
                        world.do(command, number)
                    else:
                        self.refused += 1
                case cmd.CommitCheckpoint(step=step, generation=generation, shards=shards):
                    url = f"mem://{step}-{generation}-{number}"
                    late = SimCheckpoint(step, url, shards[0]["lineage"], number)
                    world.store.published.append(late)
                case cmd.StartTimer() | cmd.WantWorkers() | cmd.AvoidNode():
                    pass  # its own
                case _:
                    world.do(command, number)

    # ----------------------------------------------------------------- the next one comes

    def _adopt(self, kill: SimKill) -> None:
        world = self.world
        if world.store.down:  # it can't be known who has the job
            world.after(STORE_POLL_S, lambda: self._adopt(kill))
            return
        if not self.inbox.lines:  # nothing had been started: there is nobody to adopt
            world.take_over()
            self.is_pending = False
            world.start_controller()
            self._hear_of()
            return
        done = self.inbox.replay(world.decide, world.policy)
        if kill.how != "lost":
            require(done.state == world.core, "replay", "the core decides otherwise, told the same")
        numbers = [step for step, _ in done.recorded]
        require(numbers == [*range(1, len(numbers) + 1)], "I2", f"{numbers} are made up")
        world.core, world.recorded = done.state, done.recorded
        world.rollbacks = done.rollbacks
        world.told_formed |= done.formed
        for node in world.nodes:
            node.avoided_until_s = done.avoided.get(node.id, 0.0)
        self.inbox.waiting.clear()
        self.inbox.durable = len(self.inbox.lines)
        world.take_over()
        world.up, self.is_pending = True, False
        world.tell(ev.ControllerChanged(world.now_s, world.controller), world.controller)
        for due_s, (name, generation) in sorted(done.timers):
            world.arm(name, generation, due_s)
        self._hear_of()

    def _hear_of(self) -> None:
        """Survivors call; the host finds out again what it had told, or would have."""
        world, number = self.world, self.world.controller
        for worker in list(world.workers.values()):
            if worker.alive:
                self._soon(lambda w=worker: self._call(w, number))  # type: ignore[misc]
                world.after(START_TIMEOUT_S, lambda w=worker: self._end_silent(w, number))  # type: ignore[misc]
            elif worker.id in world.core.ready and self.rng.random() < 0.7:
                lost = ev.WorkerLost(world.now_s, worker.id, "its process has ended")
                self._soon(lambda event=lost: world.tell(event, number))  # type: ignore[misc]
        for node in world.nodes:
            if node.keeper is not None and node.keeper.alive:
                self._soon(lambda k=node.keeper: self._keeper_calls(k, number))  # type: ignore[misc]
            if node.lost and any(m.node == node.id for m in world.core.ready.values()):
                gone = ev.NodeLost(world.now_s, node.id, "it is not there")
                self._soon(lambda event=gone: world.tell(event, number))  # type: ignore[misc]
            elif node.draining and node.up:
                drain = ev.NodeDraining(world.now_s, node.id, node.deadline_s, "preempted")
                self._soon(lambda event=drain: world.tell(event, number))  # type: ignore[misc]
        if world.asked is not None and world.asked != world.core.target:
            self._soon(lambda: world.ask_for(world.asked or 0))
        if world.stop_requested and not world.core.stopping:
            stop = ev.StopRequested(world.now_s, "asked again")
            self._soon(lambda: world.tell(stop, number))

    def _soon(self, act: Callable[[], None]) -> None:
        self.world.after(self.rng.uniform(0.01, CALLS_WITHIN_S), act)

    def _call(self, worker: SimWorker, number: int) -> None:
        world = self.world
        if not worker.has_called or number != world.controller or not world.up:
            return
        if not worker.works():
            return
        if worker.node.cut:
            world.after(CALLS_AGAIN_S, lambda: self._call(worker, number))
            return
        worker.outbox.epoch, worker.waiting = number, []
        if worker.ready:
            newest = worker.follower.fence
            world.send_up(worker, ev.WorkerReturned(world.now_s, worker.id, newest))
        heard = self.inbox.heard.get(worker.id, 0)
        for told, event in worker.outbox.kept.items():
            if told > heard:
                world.send_up(worker, event, told)

    def _end_silent(self, worker: SimWorker, number: int) -> None:
        """The host's: it started so long ago that it should have called."""
        if worker.alive and worker.outbox.epoch < number and not worker.node.cut:
            self.world.kill(worker, "it lives, and has not called")

    def _keeper_calls(self, keeper: SimKeeper, number: int) -> None:
        world = self.world
        if not keeper.alive or number != world.controller or not world.up:
            return
        if keeper.node.cut or keeper.hung:
            world.after(CALLS_AGAIN_S, lambda: self._keeper_calls(keeper, number))
            return
        keeper.call(number)
