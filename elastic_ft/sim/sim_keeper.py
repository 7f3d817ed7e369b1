"""A simulated node keeper: what ended workers sealed outlives them, and is told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic_ft.core.assignment import Keeper, Tier, WorkerId
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.events import Event, KeeperHolds, KeeperLost, KeeperReady, KeeperReturned
from elastic_ft.sim.kernel import Clock
from elastic_ft.sim.nodes import HANG_TIMEOUT_S, ComputedBy, Key, SimSavedShard, holding


@dataclass(slots=True)
class SimCopy:
    tier: Tier
    lineage: ComputedBy
    keeper: SimKeeper | None  # in whose memory it is
    damaged: bool = False


@dataclass(slots=True)
class LeftCopies:
    """What one worker left.

    Attributes:
        record: of the steps that it had applied.
        told: the controller has heard of it.
        void: it counts no more: the controller said so, or has waited long enough.
    """

    copies: dict[Key, SimCopy] = field(default_factory=dict)
    record: dict[int, RecordStep] = field(default_factory=dict)
    told: bool = False
    void: bool = False


@dataclass(slots=True)
class SimNode:
    id: str
    slots: int
    up: bool = True
    draining: bool = False
    cut: bool = False  # partitioned from everything else
    lost: bool = False  # the controller has been told so
    spoiled: bool = False  # who starts there as a joiner finds no data
    closed: bool = False  # the data network does not reach who starts there
    deadly: bool = False  # who starts there dies as soon as it forms a group
    avoided_until_s: float = 0.0
    deadline_s: float = 0.0  # of its draining
    held: list[Callable[[], None]] = field(default_factory=list)  # messages that the cut delays
    keeper: SimKeeper | None = None  # its present life, or the last one


class KeeperWorld(Clock, Protocol):
    controller: int
    duplicates: float

    def at(self, at_s: float, act: Callable[[], None]) -> None: ...
    def latency(self) -> float: ...
    def twice_after_s(self) -> float: ...
    def count_keeper(self) -> int: ...
    def kill_keeper(self, node: SimNode) -> None: ...
    def tell(self, event: Event, controller: int) -> None: ...


class SimKeeper:
    """One life of a keeper: one that starts again is another, and empty.

    ``hung``: it says nothing, serves nobody, and may go on later. ``hushed``: it serves nobody, and
    the controller hears it.
    """

    def __init__(self, world: KeeperWorld, node: SimNode) -> None:
        self.world, self.node, self.alive = world, node, True
        self.hung = self.hushed = False
        self._unsaid: list[Callable[[], None]] = []
        self.keeper = Keeper(node.id, (node.id, world.count_keeper()))
        self.left: dict[WorkerId, LeftCopies] = {}
        self._up_at_s = 0.0
        self._epoch = world.controller
        self._tell(KeeperReady(world.now_s, self.keeper))

    def inherit(
        self, worker: WorkerId, copies: Mapping[Key, SimCopy], applied: Mapping[int, RecordStep]
    ) -> None:
        """The worker is gone: what it sealed here stays."""
        kept = {key: copy for key, copy in copies.items() if copy.keeper is self}
        self.left[worker] = LeftCopies(kept, dict(applied))
        self._tell_of(worker)

    def _tell_of(self, worker: WorkerId) -> None:
        left = self.left[worker]
        held = tuple(holding(key, Tier.KEEPER) for key in left.copies)
        newest = max((one.step for one in held), default=0)
        record = tuple(line for step, line in left.record.items() if step <= newest)
        self._tell(KeeperHolds(self.world.now_s, self.node.id, worker, held, record), left)

    def call(self, controller: int) -> None:
        """Another controller than it had: it says what it has, again."""
        self._epoch = controller
        self._tell(KeeperReturned(self.world.now_s, self.keeper))
        for worker in self.left:
            self._tell_of(worker)

    def answers(self) -> bool:
        """Who asks it."""
        return self.alive and not (self.hung or self.hushed or self.node.cut)

    def find(self, worker: WorkerId, key: Key) -> SimCopy | None:
        """As who asks finds it: None if nobody answers, or it is there no more."""
        left = self.left.get(worker) if self.answers() else None
        return left.copies.get(key) if left else None

    def lineage_of(self, worker: WorkerId, key: Key) -> ComputedBy | None:
        copy = self.find(worker, key)
        return copy.lineage if copy else None

    def drop(self, worker: WorkerId) -> None:
        """What it left: once the message has come."""
        if worker in self.left:
            self.left[worker].void = True
            self.world.after(self.world.latency(), lambda: self.left.pop(worker, None))

    def hang(self, lasts_s: float) -> None:
        """The controller notices within HANG_TIMEOUT_S, in whatever phase, and ends it."""
        self.hung = True
        self.world.after(HANG_TIMEOUT_S, self._watch)
        self.world.after(lasts_s, self._go_on)

    def _watch(self) -> None:
        if self.hung and self.alive:
            self.world.kill_keeper(self.node)

    def _go_on(self) -> None:
        self.hung, unsaid = False, self._unsaid
        self._unsaid = []
        for say in unsaid if self.alive else ():
            say()

    def saves(self) -> list[SimSavedShard]:
        """What is good of what ended workers left: for the next controller, as this one is gone."""
        return [
            SimSavedShard(key, copy.lineage, left.record)
            for left in self.left.values()
            for key, copy in left.copies.items()
            if not copy.damaged
        ]

    def die(self) -> None:
        if self.alive:
            self.alive = self.hung = False
            self._unsaid.clear()
            self.left.clear()
            self._tell(KeeperLost(self.world.now_s, self.node.id))

    def _tell(self, event: Event, left: LeftCopies | None = None) -> None:
        """First in, first out; some of it late, some of it twice."""
        if self._epoch != self.world.controller:
            return  # until it has called
        if self.hung:
            self._unsaid.append(lambda: self._tell(event, left))
            return
        world, controller = self.world, self.world.controller
        delay_s = world.latency() if world.rng.random() < 0.7 else world.rng.uniform(0, 3.0)
        self._up_at_s = max(self._up_at_s, world.now_s + delay_s)

        def arrive() -> None:
            if self.node.cut:
                self.node.held.append(arrive)
            elif not isinstance(event, KeeperLost) or self.node.keeper is self:
                if left is not None:
                    left.told = True
                world.tell(event, controller)

        world.at(self._up_at_s, arrive)
        if isinstance(event, KeeperHolds) and world.rng.random() < world.duplicates:
            world.at(self._up_at_s + world.twice_after_s(), arrive)
