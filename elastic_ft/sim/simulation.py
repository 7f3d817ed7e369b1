"""The simulated world: machines, record, store, and the controller with the real core."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef, WorkerId
from elastic_ft.core.commits import PUBLISH
from elastic_ft.core.state import State
from elastic_ft.sim import checks
from elastic_ft.sim.group import Group
from elastic_ft.sim.nodes import ComputedBy, SimCheckpoint
from elastic_ft.sim.scenario import SimScenario
from elastic_ft.sim.sim_adoption import SimAdoption
from elastic_ft.sim.sim_emergency import Emergency
from elastic_ft.sim.sim_inbox import Decide
from elastic_ft.sim.sim_machines import Machines
from elastic_ft.sim.sim_worker import SimWorker

KEPT_CHECKPOINTS = 2
PUBLISH_AGAIN_S = 2.0  # before the last manifest is tried again
TAKEN_OVER_S = 5.0  # a controller is followed by the next within so long


class Simulation(Machines):
    """Attributes:
    recorded: (step, generation that computed it), the lines of steps.jsonl.
    formed: the newest generation whose members all have their state.
    retain_live: workers keep the shards that a new cut was made from until that is held.
    hold_late: workers hold a snapshot of a generation that they have left when its copy ended.
    adoption: None where a controller's end is that of its workers.
    """

    def __init__(
        self,
        scenario: SimScenario,
        decide: Decide,
        retain_live: bool,
        hold_late: bool = False,
        undone: Collection[str] = (),
    ) -> None:
        super().__init__(scenario)
        self.decide = decide
        self.retain_live, self.hold_late = retain_live, hold_late
        self.undone = frozenset(undone)
        self.events = 0
        self.recorded: list[tuple[int, int]] = []
        self.told_formed: set[int] = set()  # generations, as the journal says
        self.flushed = 0  # lines that a crash of the controller can't tear
        self.rollbacks: list[tuple[int, int]] = []  # (from step, to step)
        self.formed = 0
        self.rescued: list[int] = []  # the steps gone on from, as keepers had saved them
        self.publishing: list[cmd.CommitCheckpoint] = []
        self.silenced: list[cmd.CommitCheckpoint] = []  # their outcome came late, or never
        self.overdue: set[int] = set()  # steps, of what could not be published in time
        self.stop_requested = False
        self.asked: int | None = None  # how many workers, until the job has ended
        self.on_turn: Callable[[], None] = lambda: None
        self.adoption = SimAdoption(self) if scenario.adopts else None

    @property
    def trains_alone(self) -> bool:
        return self.adoption is not None and self.adoption.is_pending

    @property
    def adopts(self) -> bool:
        return self.adoption is not None

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

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
        if self.adoption is not None:
            self.adoption.begin()
        for node in self.nodes:
            self.start_keeper(node)
        self.tell(ev.JobStarted(self.now_s, refs, generation, recorded), self.controller)
        if self.asked is not None:
            self.ask_for(self.asked)

    def ask_for(self, workers: int) -> None:
        self.asked = workers
        self.tell(ev.ResizeRequested(self.now_s, workers, f"r{self.events}"), self.controller)

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

    def tell(
        self, event: ev.Event, controller: int, sender: WorkerId = "", number: int = 0
    ) -> None:
        if not self.up or controller != self.controller or self.finish is not None:
            return
        if self.adoption is not None and not self.adoption.take(event, sender, number):
            return
        if isinstance(event, ev.WorkerHung):
            checks.hangs(self, event.worker)
        self.events += 1
        self.core, commands = self.decide(self.core, event, self.policy)
        self.note(repr(event))
        for command in commands:
            if isinstance(command, cmd.FormGeneration):
                checks.world_is_allowed(self, command.assignment)
            elif isinstance(command, cmd.RecordStep):
                checks.survives(self, command.step)
        if self.adoption is not None:
            self.adoption.carry_out(commands)
        else:
            for command in commands:
                self.do(command, controller)
        self.on_turn()

    def do(self, command: cmd.Command, controller: int) -> None:
        """Which of them does it, if it still can."""
        self.note(repr(command))
        match command:
            case cmd.WantWorkers(total=total):
                self.want = total
                self.fill()
            case cmd.AvoidNode(node=at, for_s=for_s):
                for node in self.nodes:
                    if node.id == at:
                        node.avoided_until_s = self.now_s + for_s
                self.after(for_s, self.fill)
            case cmd.KillWorker(worker=name):
                self._kill_from_afar(self.workers[name])
            case (
                cmd.ReleaseWorker(worker=name) | cmd.Bench(worker=name) | cmd.UseKeeper(worker=name)
            ):
                self.send_down(name, command, controller)
            case cmd.DropKept(node=at, worker=name):
                for node in self.nodes:
                    if node.id == at and node.keeper is not None:
                        node.keeper.drop(name)
            case cmd.PauseWorkers(workers=names) | cmd.StopAtBoundary(workers=names):
                checks.require(bool(command.reason), "I8", f"no reason: {command}")
                for name in names:
                    self.send_down(name, command, controller)
            case cmd.FormGeneration(assignment=new):
                checks.require(bool(new.reason), "I8", f"no reason: {command}")
                self.groups[new.generation] = Group(self, new)
                for member in (*new.members, *new.donors):
                    self.send_down(member.worker, command, controller)
            case cmd.RecordStep():
                checks.check_recorded(self, command)
                self.recorded.append((command.step, command.generation))
            case cmd.RollBack(step=step):
                checks.rolled_back(self, command)
                self.rollbacks.append((len(self.recorded), step))
                self.recorded = self.recorded[:step]
                self.flushed = min(self.flushed, step)
            case cmd.CommitCheckpoint():
                self._commit(command)
            case cmd.AbandonCheckpoint():
                checks.attempt_dropped(self, command)
            case cmd.StartTimer(timer=name, generation=generation, after_s=after_s):
                self.arm(name, generation, self.now_s + after_s)
            case cmd.FinishJob(status=status, reason=reason):
                self.finish = command
                checks.finished(self, status, reason)
            case cmd.Journal():
                self._journalled(command)

    def _journalled(self, line: cmd.Journal) -> None:
        checks.require(bool(line.reason), "I8", f"no reason: {line}")
        if line.event == "worker_left_out":
            checks.left_out(self, line.fields["worker"], line.reason)
        if line.event == "generation_formed":
            checks.check_formed(self, self.groups[line.generation])
            self.told_formed.add(line.generation)

    def _kill_from_afar(self, worker: SimWorker) -> None:
        if not worker.alive:
            return

        def act() -> None:
            if worker.node.cut:
                self.after(1.0, act)
            else:
                self.kill(worker, "killed")

        self.after(self.rng.uniform(0.01, 0.3), act)

    def arm(self, name: str, generation: int, due_s: float) -> None:
        """A timer; at once, if its time is over."""
        controller = self.controller

        def fire() -> None:
            if controller != self.controller or self.trains_alone:
                return
            if name.startswith(PUBLISH):
                step = int(name.split()[1])
                self.overdue |= {c.step for c in self.publishing if c.step == step}
            if name == "keeper" and generation == self.core.generation:
                self._stop_waiting()
            self.tell(ev.TimerFired(self.now_s, name, generation), controller)

        self.at(max(due_s, self.now_s), fire)

    def _stop_waiting(self) -> None:
        """What keepers have not told by now comes too late."""
        for node in self.nodes:
            for left in node.keeper.left.values() if node.keeper else ():
                left.void = left.void or not left.told

    # -------------------------------------------------------- what a group has looked at

    def true_source(self, group: Group) -> ComputedBy:
        return checks.source(self, group)

    def look_at_restored(self, worker: SimWorker, group: Group, lineage: ComputedBy) -> None:
        checks.restored(worker, group, lineage)

    def look_at_applied(self, worker: SimWorker, group: Group, step: int) -> None:
        checks.applied(self, worker, group, step)

    # ------------------------------------------------------------------------- store

    def _commit(self, command: cmd.CommitCheckpoint) -> None:
        self.flushed = len(self.recorded)  # lines first, then what refers to them
        self.publishing.append(command)
        controller = self.controller
        until_s = self.now_s + self.policy.suspend_timeout_s

        def done() -> None:
            if controller != self.controller or command not in self.publishing:
                return
            if self.store.silent and not self.silenced.count(command):
                self.silenced.append(command)
                if self.rng.random() < 0.5:  # else nobody ever hears of it
                    self.after(self.rng.uniform(20.0, 100.0), done)
                return
            if self.store.down and self._insists(command.step) and self.now_s < until_s:
                self.after(PUBLISH_AGAIN_S, done)
                return
            self.publishing.remove(command)
            if self.store.down:
                self.tell(ev.CheckpointFailed(self.now_s, command.step, "down"), controller)
            else:
                url = self._publish(command)
                self.tell(ev.CheckpointCommitted(self.now_s, command.step, url, 1, 0.1), controller)

        self.after(self.rng.choice((0.1, self.rng.uniform(0.1, 5.0))), done)

    def _insists(self, step: int) -> bool:
        """No later one has what the last has: it is tried again, as by ``controller.publisher``."""
        return step >= self.scenario.steps and "republishes" not in self.undone

    def leave_store(self) -> None:
        """Its controller goes: a PUT that was under way is done, or is not."""
        for command in self.publishing:
            if not self.store.down and self.rng.random() < 0.5:
                self._publish(command)
        self.publishing = []

    def _publish(self, command: cmd.CommitCheckpoint) -> str:
        lineage = checks.published(self, command)
        there = [c.url for c in self.store.good() if (c.step, c.lineage) == (command.step, lineage)]
        if there and self.adoption is not None:  # by the one before, who never heard of it
            return there[0]
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

    def _wake(self, writing: list[cmd.CommitCheckpoint], number: int) -> None:
        for command in writing:
            lineage = command.shards[0]["lineage"]
            url = f"mem://{command.step}-{command.generation}-{number}"
            self.store.published.append(SimCheckpoint(command.step, url, lineage, number))
            self.note(f"controller {number} wakes up and publishes {url}")
