"""A simulated worker: the protocol of ``worker.worker``, without tensors.

It follows its controller as the real one does, by ``core.follower``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_ft.core import commands as cmd
from elastic_ft.core import follower as fo
from elastic_ft.core.assignment import Assignment, Holding, Member, Tier, WorkerId
from elastic_ft.core.events import (
    CollectiveFailed,
    Event,
    Paused,
    ShardsFailed,
    ShardsWritten,
    StepApplied,
    Unkept,
    WorkerDone,
)
from elastic_ft.core.policy import Policy
from elastic_ft.sim.kernel import Clock
from elastic_ft.sim.nodes import ComputedBy, Key, ObjectStore, holding
from elastic_ft.sim.scenario import SimScenario
from elastic_ft.sim.sim_keeper import SimCopy, SimKeeper, SimNode

UPLOAD_AGAIN_S = 2.0  # before the last state is written again


@dataclass(frozen=True, slots=True)
class Live:
    step: int
    generation: int  # that computed the step, as the worker knows it
    space: str
    shard: str
    lineage: ComputedBy  # the truth

    @property
    def key(self) -> Key:
        return self.step, self.generation, self.space, self.shard


@dataclass(slots=True)
class Laid:
    """What a worker's module is laid out as.

    Attributes:
        lineage: of what its tensors hold, the truth; None: they were never filled.
    """

    space: str
    shard: str
    lineage: ComputedBy | None = None


@dataclass(slots=True)
class Outbox:
    """What a worker has told and nobody has acknowledged, by number.

    Attributes:
        epoch: the number of its controller.
    """

    epoch: int
    last: int = 0
    kept: dict[int, Event] = field(default_factory=dict)

    def put(self, event: Event) -> int:
        self.last += 1
        self.kept[self.last] = event
        return self.last

    def acknowledge(self, number: int) -> None:
        self.kept = {n: event for n, event in self.kept.items() if n > number}


class Collectives(Protocol):
    """What a worker knows of its group."""

    generation: int
    assignment: Assignment
    all: dict[WorkerId, SimWorker]
    checkpointed: int
    failed: str

    def connected(self) -> bool: ...
    def fail(self, why: str) -> None: ...
    def trains(self, worker: SimWorker) -> bool: ...
    def join(self, worker: SimWorker) -> None: ...
    def end(self, worker: SimWorker) -> None: ...


class WorkerWorld(Clock, Protocol):
    scenario: SimScenario
    policy: Policy
    store: ObjectStore
    controller: int
    undone: frozenset[str]

    @property
    def groups(self) -> Mapping[int, Collectives]: ...
    def send_up(self, worker: SimWorker, event: Event, number: int = 0) -> None: ...
    def kill(self, worker: SimWorker, why: str) -> None: ...


class SimWorker:
    """Attributes:
    follower: what it knows of the controller's will, its fence among it (I1).
    unapplied: a step whose gradients are here but whose optimizer has not run: a straddler.
    laid: what its module is laid out as, which is the live state where that is ``intact``.
    copies: snapshots in host memory, own and for peers.
    record: of the steps applied here.
    has_called: its first controller, and would find the next one.
    is_heard: who takes its reports has answered once.
    """

    def __init__(self, world: WorkerWorld, name: str, node: SimNode) -> None:
        self.world, self.id, self.node = world, name, node
        self.member = Member(name, node.id, node.id, int(name[1:]))
        self.alive, self.hung = True, False
        self.has_called = self.ready = False
        self.unreachable, self.doomed = node.closed, node.deadly
        self.follower = fo.Follower()
        self.pause_flag = self.stop_flag = self.is_done = self.is_heard = False
        self.unapplied: int | None = None
        self.group: Collectives | None = None
        self.live: Live | None = None
        self.laid: Laid | None = None
        self.intact = True
        self.copies: dict[Key, SimCopy] = {}
        self.record: dict[int, cmd.RecordStep] = {}
        self.keeper: SimKeeper | None = None
        self.uploads = 0
        self.insisted_s: dict[int, float] = {}  # by step, since when
        self.checkpointed = 0
        self.pace_s = 1.0
        self.up_at_s = self.down_at_s = 0.0  # when the last message on its way arrives
        self.cut_off = False  # what was on its way is lost
        self.outbox = Outbox(world.controller)
        self.waiting: list[tuple[int, Event]] = []  # of the newest: see ``send``
        self.patient_until_s = 0.0

    @property
    def released(self) -> bool:
        return self.follower.released is not None

    @property
    def owes_answer(self) -> bool:
        """It was asked to pause, and has not answered."""
        return self.follower.asked > self.follower.answered

    def answers(self) -> bool:
        """Alive, running, and within reach of the controller."""
        return self.alive and not self.hung and not self.node.cut

    def works(self) -> bool:
        return self.alive and not self.hung

    def send(self, event: Event) -> None:
        """A step's word may wait for the next message, and is lost with its worker: see
        ``transport.outbox``."""
        world, patience_s = self.world, self.world.scenario.patience_s
        self.waiting.append((self.outbox.put(event), event))
        is_patient = isinstance(event, StepApplied)
        if is_patient and world.now_s < self.patient_until_s:
            world.after(patience_s, self._tell)
            return
        self.patient_until_s = world.now_s + patience_s if is_patient else 0.0
        self._tell()

    def _tell(self) -> None:
        if self.hung and self.alive:  # its heartbeat is, too
            self.world.after(self.world.scenario.patience_s, self._tell)
            return
        waiting, self.waiting = self.waiting, []
        for number, event in waiting if self.alive else ():
            self.world.send_up(self, event, number)

    # ---------------------------------------------------------------- what it holds

    def everything(self) -> Iterator[tuple[Holding, ComputedBy]]:
        if self.live is not None:
            yield holding(self.live.key, Tier.LIVE), self.live.lineage
        for key, copy in self.copies.items():
            yield holding(key, copy.tier), copy.lineage

    def lineage_of(self, key: Key, tier: Tier) -> ComputedBy | None:
        for held, lineage in self.everything():
            if held == holding(key, tier):
                return lineage
        return None

    def keep(self, key: Key, tier: Tier, lineage: ComputedBy, *, sealed: bool = True) -> None:
        """``sealed``: in the keeper's memory, if there is a keeper."""
        old = self.copies.get(key)
        if old is None or old.tier is Tier.PEER:
            self.copies[key] = SimCopy(tier, lineage, self.keeper if sealed else None)

    def lose_keeper_line(self) -> None:
        """The keeper takes it for gone, and it lives: what it holds from now on is its own."""
        if self.keeper is not None and self.keeper.alive:
            self.keeper.inherit(self.id, self.copies, self.record)
        self.keeper = None
        for copy in self.copies.values():
            copy.keeper = None

    def is_held(self, *, cut: bool) -> bool:
        """Whether its snapshot is of use: where state is not cut, to a keeper alone."""
        if cut or (self.keeper is not None and self.keeper.alive):
            return True
        self.send(Unkept(self.world.now_s, self.id, "its keeper does not hear it"))
        return False

    def drop(self, *, before: int = 0, after: int | None = None) -> None:
        self.copies = {
            key: copy
            for key, copy in self.copies.items()
            if key[0] >= before and (after is None or key[0] <= after)
        }

    def newest_own(self) -> int:
        own = [key[0] for key, copy in self.copies.items() if copy.tier is Tier.HOST]
        return max(own, default=0)

    # -------------------------------------------------------------- what it is told

    def receive(self, message: Any) -> None:
        if not self.works() or self.released:
            return
        if isinstance(message, cmd.UseKeeper):
            self.keeper = self.node.keeper
        elif isinstance(message, cmd.StopAtBoundary):
            self.stop_flag = True
        elif isinstance(message, cmd.ReleaseWorker):
            self.follower, _ = fo.hear(self.follower, message)
            self.world.after(0.05, lambda: self.world.kill(self, "released"))
        elif isinstance(message, cmd.FormGeneration):
            generation = message.assignment.generation
            self._hear(fo.BeginGeneration(generation, self.world.groups[generation]))
        elif isinstance(message, (cmd.PauseWorkers, cmd.Bench)):
            self._hear(message)

    def _hear(self, message: fo.Heard) -> None:
        self.follower, actions = fo.hear(self.follower, message)
        group = self.group
        if group is not None:
            if fo.PauseAtBoundary() in actions and group.trains(self):
                self.pause_flag = True
                return
            if isinstance(message, cmd.Bench):  # a donor: the others go on without it
                group.all.pop(self.id, None)
            elif actions and not self.is_done:
                group.fail(f"{self.id} breaks off")
        self.rest()

    def rest(self) -> None:
        """At the safe point, to which a straddler comes once it has applied its step."""
        if self.unapplied is not None:
            return
        self.group = None
        self.pause_flag = False
        self.follower, actions = fo.rest(self.follower)
        for action in actions:
            if isinstance(action, fo.DropAfter):
                self._drop_after(action.step)
            elif isinstance(action, fo.AnswerPause):
                holdings = tuple(held for held, _ in self.everything())
                self.send(Paused(self.world.now_s, self.id, action.generation, holdings))
            elif isinstance(action, fo.BeginGeneration):
                self._begin(action.form)

    def _begin(self, group: Collectives) -> None:
        self.is_done = False
        self.group = group
        self.checkpointed = group.checkpointed
        group.join(self)
        if self.doomed:
            self.world.after(0.1, lambda: self.world.kill(self, "killed by SIGSEGV"))

    def _drop_after(self, step: int) -> None:
        """What it holds of steps that others train again is gone."""
        self.drop(after=step)
        if self.live is not None and self.live.step > step:
            self.live = None

    # ------------------------------------------------------------------ what it does

    def broken(self, group: Collectives) -> None:
        if self.group is not group or not self.works() or self.unapplied is not None:
            return
        step = self.live.step if self.live else 0
        self.send(CollectiveFailed(self.world.now_s, self.id, group.generation, step, "broken"))
        self.rest()

    def upload(self, generation: int) -> None:
        """Its part of a checkpoint of the live state; the first replica of a shard writes it."""
        live, group = self.live, self.group
        assert live is not None and group is not None
        self.checkpointed = live.step
        self.uploads += 1
        rank = group.assignment.rank_of(self.id)
        layout = group.assignment.layout
        first = next(r for r in range(layout.world_size) if layout.shard_of(r) == live.shard)
        entry = {"space": live.space, "shard": live.shard, "lineage": live.lineage}
        shards = (entry,) if rank == first else ()

        began_s, step = self.world.now_s, live.step
        took_s = self.world.rng.uniform(0.1, 4.0)

        def written() -> None:
            if not self.works():
                return
            if self._is_store_away() and self._insists(group, step):
                self.world.after(UPLOAD_AGAIN_S, written)
                return
            self.uploads -= 1
            now_s = self.world.now_s
            if self._is_store_away():
                self.send(ShardsFailed(now_s, self.id, generation, step, "the store is down"))
            else:
                self.insisted_s.pop(step, None)
                took_s = round(now_s - began_s, 4)
                self.send(ShardsWritten(now_s, self.id, generation, step, shards, took_s=took_s))

        self.world.after(took_s, written)

    def _is_store_away(self) -> bool:
        store, node = self.world.store, self.node
        return store.down or node.cut or node.id in store.unwritten_on

    def _insists(self, group: Collectives, step: int) -> bool:
        """Whether that is the job's last, and nobody waits for this worker: it is written again and
        again, as by ``state.checkpointer``."""
        world = self.world
        if step < world.scenario.steps or "insists" in world.undone:
            return False
        since_s = self.insisted_s.setdefault(step, world.now_s)
        called_off = self.group is not group or group.failed or self.pause_flag or self.stop_flag
        return not called_off and world.now_s <= since_s + world.policy.suspend_timeout_s

    def finish(self, group: Collectives) -> None:
        """The last step, or a stop: everything durable, then ``done``."""
        if self.group is not group or not self.works():
            return
        assert self.live is not None
        if self.checkpointed != self.live.step and self.live.step > 0:
            self.upload(group.generation)
        group.end(self)

    def done(self, group: Collectives) -> None:
        if self.group is not group or not self.works():
            return
        assert self.live is not None
        self.is_done = True
        digest = ".".join(map(str, self.live.lineage))
        step = self.live.step
        self.send(WorkerDone(self.world.now_s, self.id, group.generation, step, digest))
        if self.pause_flag:
            self.rest()

    def lay_out(self, space: str, shard: str) -> bool:
        """Returns whether the state of before is in place: the module stays if the shard stays, and
        was filled unless an attempt that broke off has made it."""
        laid = self.laid
        if laid is None or (laid.space, laid.shard) != (space, shard):
            self.laid, self.intact = Laid(space, shard), False
            return False
        return self.intact or "unfilled" in self.world.undone
