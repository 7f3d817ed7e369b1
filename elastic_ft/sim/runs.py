"""Runs a scenario: faults first (safety), then all heals and the job must finish (liveness)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_ft.core.assignment import Tier
from elastic_ft.core.events import NodeDraining, StopRequested, WorkerRaised
from elastic_ft.core.membership import step as core_step
from elastic_ft.sim import checks
from elastic_ft.sim.nodes import HANG_TIMEOUT_S
from elastic_ft.sim.scenario import SimFault, SimKill, SimScenario
from elastic_ft.sim.sim_adoption import SimAdoption
from elastic_ft.sim.sim_inbox import Decide
from elastic_ft.sim.sim_keeper import SimKeeper, SimNode
from elastic_ft.sim.simulation import Simulation

T = TypeVar("T")
# Kinds of faults that differ in a word.
STORE_FLAGS = {"store_down": "down", "base_away": "base_away", "publisher_silent": "silent"}
REPLACED = {"kill_controller": "killed", "halt_controller": "stopped", "lose_controller": "lost"}
UNNOTICED_S = 0.05  # before the controller can know


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a scenario. ``steps_lost``: recorded steps that had to be redone."""

    seed: int
    trace_hash: str
    virtual_s: float
    events: int
    generations: int
    recoveries: int
    rollbacks: int
    steps_lost: int
    fired: Counter[str]
    rescues: int = 0  # a step was gone on from that keepers had saved
    recorded: tuple[tuple[int, int], ...] = ()  # (step, generation)
    state_digest: str = ""
    ends: Counter[str] = field(default_factory=Counter)  # of workers, by why
    adoptions: Counter[str] = field(default_factory=Counter)  # by how the one before had ended
    left_in: tuple[str, ...] = ()  # in which phases
    refused: int = 0  # lines that controllers would have written which had the job no more
    lines: int = 0  # that controllers were told
    trace: tuple[str, ...] = ()


def simulate(
    scenario: SimScenario,
    *,
    decide: Decide = core_step,
    retain_live: bool = True,
    hold_late: bool = False,
    undone: Collection[str] = (),
    trace: bool = False,
) -> Report:
    """Returns what happened. Raises checks.SimViolation, with the seed, if an invariant broke.

    ``decide`` is the core's step function: tests put a broken one here to see the checks fail.
    ``undone``: corrections that simulated workers, and publishers, are without: "unfilled" (a
    layout that was never filled is known), "insists" and "agrees" (on the last uploads),
    "republishes" (the last manifest), "first-report" (needs nobody in charge).
    ``trace`` collects every event and command in words.
    """
    world = Simulation(scenario, decide, retain_live, hold_late, undone)
    if trace:
        world.trace = []
    chaos = Chaos(world)
    world.on_turn = chaos.look
    world.at(scenario.heal_at_s, chaos.heal)
    world.take_over()
    world.start_controller()
    try:
        _run(world)
    except AssertionError as error:
        seed = f"{error} (seed {scenario.seed}, at {world.now_s:.3f} s, {scenario.policy.strategy})"
        if world.trace is not None:
            seed = "\n".join([*world.trace, seed])
        raise checks.SimViolation(seed) from error
    return Report(
        seed=scenario.seed,
        trace_hash=world.digest(),
        virtual_s=round(world.now_s, 3),
        events=world.events,
        generations=max([0, *world.groups]),
        recoveries=len(world.core.recoveries),
        rollbacks=len(world.rollbacks),
        steps_lost=sum(before - after for before, after in world.rollbacks),
        fired=chaos.fired,
        rescues=len(world.rescued),
        recorded=tuple(world.recorded),
        ends=world.ends,
        state_digest=world.finish.state_digest if world.finish else "",
        **_adopted(world.adoption),
        trace=tuple(world.trace or ()),
    )


def _adopted(adoption: SimAdoption | None) -> dict[str, Any]:
    if adoption is None:
        return {}
    return {
        "adoptions": adoption.done,
        "left_in": tuple(adoption.phases),
        "refused": adoption.refused,
        "lines": adoption.told,
    }


def _run(world: Simulation) -> None:
    scenario = world.scenario
    deadline_s = scenario.heal_at_s + scenario.finish_within_s
    while world.finish is None:
        checks.require(world.turn(), "I7", "nothing is left to happen, and the job is not done")
        late = f"at step {len(world.recorded)}, {world.core.phase}, g{world.core.generation}"
        checks.require(world.now_s < deadline_s, "I7", f"not done {deadline_s:g} s on: {late}")
        checks.require(world.events < scenario.events_max, "I7", f"{world.events} events: {late}")


class Chaos:
    """Fires the faults of a scenario when their moment comes. ``fired`` counts by kind."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.waiting = list(world.scenario.faults)
        self.fired: Counter[str] = Counter()
        self.healed = False

    def look(self) -> None:
        core = self.world.core
        for fault in list(self.waiting):
            if core.phase == fault.phase and core.committed >= fault.at_step:
                self.waiting.remove(fault)
                self.world.after(fault.after_s, lambda f=fault: self._fire(f))  # type: ignore[misc]

    def heal(self) -> None:
        """No more faults; everything comes back."""
        world, self.healed = self.world, True
        self.waiting.clear()
        world.store.down = world.store.silent = world.store.base_away = False
        world.store.unread_on.clear()
        world.store.unwritten_on.clear()
        world.duplicates = 0.0
        for node in world.nodes:
            node.spoiled = node.deadly = False
            self._open_ports(node)
        world.latency_s = world.scenario.latency_s
        for node in list(world.nodes):
            if node.cut:
                world.heal_cut(node)
        for _ in range(world.node_count):
            world.bring_node()

    def _fire(self, fault: SimFault) -> None:
        world = self.world
        if self.healed or world.finish is not None or not (world.up or world.trains_alone):
            return
        try:
            if fault.kind in STORE_FLAGS:
                self._for_a_while(fault, world.store, STORE_FLAGS[fault.kind])
            elif fault.kind in REPLACED:
                self._replace_controller(REPLACED[fault.kind], fault)
            else:
                getattr(self, f"_{fault.kind}")(fault)
        except NothingThere:
            return
        self.fired[fault.kind] += 1
        world.note(f"fault {fault}")

    # Each raises NothingThere if there is nothing to fail.

    def _crash_worker(self, fault: SimFault) -> None:
        self.world.kill(_one(self.world.alive(), fault), "crashed")

    def _crash_every_worker(self, fault: SimFault) -> None:
        """Out of memory everywhere, say: the nodes and their keepers live."""
        for worker in _some(self.world.alive()):
            self.world.kill(worker, "crashed")

    def _crash_everything(self, fault: SimFault) -> None:
        """Every process on every node: what is left is in the store."""
        for node in self.world.nodes:
            self.world.kill_keeper(node)
        for worker in self.world.alive():
            self.world.kill(worker, "crashed")

    def _store_half_down(self, fault: SimFault) -> None:
        """One node can't read it, the others can."""
        self._bar(fault, self.world.store.unread_on)

    def _store_unwritten(self, fault: SimFault) -> None:
        """One node can't write it, the others can."""
        self._bar(fault, self.world.store.unwritten_on)

    def _bar(self, fault: SimFault, barred: set[str]) -> None:
        node = self._node(fault)
        barred.add(node.id)
        self.world.after(fault.lasts_s, lambda: barred.discard(node.id))

    def _spoil_node(self, fault: SimFault) -> None:
        """Its data is gone: who trains there has read it, who comes there can't."""
        self._for_a_while(fault, self._node(fault), "spoiled")

    def _close_ports(self, fault: SimFault) -> None:
        """A firewall that bars new connections: who trains there has its own."""
        node = self._node(fault)
        node.closed = True
        self.world.after(fault.lasts_s, lambda: self._open_ports(node))

    def _open_ports(self, node: SimNode) -> None:
        node.closed = False
        for worker in self.world.on(node):
            worker.unreachable = False

    def _make_deadly(self, fault: SimFault) -> None:
        """A bad device: whoever starts there crashes, again and again."""
        self._node(fault).deadly = True

    def _crash_worker_there(self, fault: SimFault) -> None:
        self.world.kill(_some(self.world.on(self._node(fault)))[0], "crashed")

    def _crash_keeper(self, fault: SimFault) -> None:
        self.world.kill_keeper(self._keeper(fault).node)

    def _lose_keeper_line(self, fault: SimFault) -> None:
        workers = [w for w in self.world.alive() if w.keeper is not None and w.keeper.alive]
        _one(workers, fault).lose_keeper_line()

    def _hang_keeper(self, fault: SimFault) -> None:
        keeper = self._keeper(fault)
        _need(not keeper.hung)
        keeper.hang(fault.lasts_s)

    def _hush_keeper(self, fault: SimFault) -> None:
        """Workers can't reach it, for a while; the controller can."""
        self._for_a_while(fault, self._keeper(fault), "hushed")

    def _node(self, fault: SimFault) -> SimNode:
        return _one([n for n in self.world.nodes if n.up and not n.cut and not n.lost], fault)

    def _keeper(self, fault: SimFault) -> SimKeeper:
        keeper = self._node(fault).keeper
        if keeper is None or not keeper.alive:
            raise NothingThere
        return keeper

    def _for_a_while(self, fault: SimFault, of: Any, name: str) -> None:
        """``of`` is so until the fault is over; a later one of the kind ends with this one."""
        setattr(of, name, True)
        self.world.after(fault.lasts_s, lambda: setattr(of, name, False))

    def _crash_node(self, fault: SimFault) -> None:
        self.world.lose_node(self._node(fault), "power")
        self.world.after(fault.lasts_s, self.world.bring_node)

    def _add_node(self, fault: SimFault) -> None:
        self.world.bring_node()

    def _hang_worker(self, fault: SimFault) -> None:
        worker = _one([w for w in self.world.alive() if not w.hung], fault)
        worker.hung = True
        self.world.after(HANG_TIMEOUT_S, lambda: self.world.watch_hung(worker))

    def _partition_node(self, fault: SimFault) -> None:
        node = self._node(fault)
        self.world.cut_node(node)

        def heal() -> None:
            if node.cut:
                self.world.heal_cut(node)
            if node.lost:  # once declared dead, a node does not come back: a new one does
                self.world.bring_node()

        self.world.after(fault.lasts_s, heal)

    def _drain_node(self, fault: SimFault) -> None:
        node, world = self._node(fault), self.world
        _need(not node.draining)
        node.draining = True
        node.deadline_s = deadline_s = world.now_s + fault.lasts_s
        event = NodeDraining(world.now_s, node.id, deadline_s, "preempted")
        controller = world.controller
        world.after(UNNOTICED_S, lambda: world.tell(event, controller))
        world.at(deadline_s, lambda: world.lose_node(node, "preempted"))
        world.at(deadline_s + 2.0, world.bring_node)

    def _break_collective(self, fault: SimFault) -> None:
        _some([w.group for w in self.world.members() if w.group])[0].fail("a link flapped")

    def _raise_error(self, fault: SimFault) -> None:
        """The same exception on every rank, as user code's bugs come."""
        world = self.world
        _need(world.core.phase == "running")
        raising = [w for w in world.members() if w.works() and w.group and w.unapplied is None]
        for worker in _some(raising):
            group = worker.group
            assert group is not None
            step = worker.live.step + 1 if worker.live else 1
            worker.send(WorkerRaised(world.now_s, worker.id, group.generation, step, "ValueError"))
            worker.group = None
            group.fail("a peer raised")

    def _damage_memory(self, fault: SimFault) -> None:
        """Bits rot in the newest snapshot that one worker holds, its own or a peer's."""
        copies = _one([w for w in self.world.alive() if w.copies], fault).copies
        newest = max(copies, key=lambda key: (key[0], copies[key].tier is Tier.PEER))
        copies[newest].damaged = True

    def _damage_checkpoint(self, fault: SimFault) -> None:
        _some(self.world.store.published)[-1].damaged = True

    def _slow_network(self, fault: SimFault) -> None:
        def fast() -> None:
            self.world.latency_s = self.world.scenario.latency_s

        self.world.latency_s = 2.5
        self.world.after(fault.lasts_s, fast)

    def _request_stop(self, fault: SimFault) -> None:
        world = self.world
        world.stop_requested = True
        world.tell(StopRequested(world.now_s, "someone asked"), world.controller)

    def _resize(self, fault: SimFault) -> None:
        world, policy = self.world, self.world.policy
        workers = _one(range(policy.min_workers, policy.max_workers + 1, policy.multiple_of), fault)
        _need(workers != (world.core.target or policy.max_workers))
        world.ask_for(workers)

    def _slow_worker(self, fault: SimFault) -> None:
        _need(self.world.policy.evict_stragglers)
        _one(self.world.members(), fault).pace_s = 5.0

    def _crash_controller(self, fault: SimFault) -> None:
        self.world.crash_controller()

    def _stop_controller(self, fault: SimFault) -> None:
        _need(self.world.stop_controller(fault.lasts_s))

    def _replace_controller(self, how: str, fault: SimFault) -> None:
        """Workers train on, and the next one adopts them."""
        adoption = self.world.adoption
        _need(adoption is not None and adoption.go(SimKill(0, how, fault.lasts_s)))


class NothingThere(Exception):
    """A fault has nothing to befall."""


def _need(truth: bool) -> None:
    if not truth:
        raise NothingThere


def _some(found: list[T]) -> list[T]:
    _need(bool(found))
    return found


def _one(found: Sequence[T], fault: SimFault) -> T:
    _need(bool(found))
    return found[fault.target % len(found)]
