"""Runs a scenario: faults first (safety), then all heals and the job must finish (liveness)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

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
        if getattr(self, f"_{fault.kind}")(fault) is not False:
            self.fired[fault.kind] += 1
            world.note(f"fault {fault}")

    # Each returns False if there was nothing to fail.

    def _crash_worker(self, fault: SimFault) -> bool | None:
        alive = self.world.alive()
        if not alive:
            return False
        self.world.kill(alive[fault.target % len(alive)], "crashed")
        return None

    def _crash_every_worker(self, fault: SimFault) -> bool | None:
        """Out of memory everywhere, say: the nodes and their keepers live."""
        alive = self.world.alive()
        for worker in alive:
            self.world.kill(worker, "crashed")
        return None if alive else False

    def _crash_everything(self, fault: SimFault) -> None:
        """Every process on every node: what is left is in the store."""
        for node in self.world.nodes:
            self.world.kill_keeper(node)
        for worker in self.world.alive():
            self.world.kill(worker, "crashed")

    def _store_half_down(self, fault: SimFault) -> bool | None:
        """One node can't read it, the others can."""
        if (node := self._node(fault)) is None:
            return False
        unread = self.world.store.unread_on
        unread.add(node.id)
        self.world.after(fault.lasts_s, lambda: unread.discard(node.id))
        return None

    def _store_unwritten(self, fault: SimFault) -> bool | None:
        """One node can't write it, the others can."""
        if (node := self._node(fault)) is None:
            return False
        unwritten = self.world.store.unwritten_on
        unwritten.add(node.id)
        self.world.after(fault.lasts_s, lambda: unwritten.discard(node.id))
        return None

    def _publisher_silent(self, fault: SimFault) -> None:
        self._for_a_while(fault, self.world.store, "silent")

    def _spoil_node(self, fault: SimFault) -> bool | None:
        """Its data is gone: who trains there has read it, who comes there can't."""
        if (node := self._node(fault)) is None:
            return False
        self._for_a_while(fault, node, "spoiled")
        return None

    def _close_ports(self, fault: SimFault) -> bool | None:
        """A firewall that bars new connections: who trains there has its own."""
        if (node := self._node(fault)) is None:
            return False
        node.closed = True
        self.world.after(fault.lasts_s, lambda: self._open_ports(node))
        return None

    def _open_ports(self, node: SimNode) -> None:
        node.closed = False
        for worker in self.world.on(node):
            worker.unreachable = False

    def _make_deadly(self, fault: SimFault) -> bool | None:
        """A bad device: whoever starts there crashes, again and again."""
        if (node := self._node(fault)) is None:
            return False
        node.deadly = True
        return None

    def _crash_worker_there(self, fault: SimFault) -> bool | None:
        node = self._node(fault)
        if node is None or not self.world.on(node):
            return False
        self.world.kill(self.world.on(node)[0], "crashed")
        return None

    def _crash_keeper(self, fault: SimFault) -> bool | None:
        if (keeper := self._keeper(fault)) is None:
            return False
        self.world.kill_keeper(keeper.node)
        return None

    def _lose_keeper_line(self, fault: SimFault) -> bool | None:
        workers = [w for w in self.world.alive() if w.keeper is not None and w.keeper.alive]
        if not workers:
            return False
        workers[fault.target % len(workers)].lose_keeper_line()
        return None

    def _hang_keeper(self, fault: SimFault) -> bool | None:
        keeper = self._keeper(fault)
        if keeper is None or keeper.hung:
            return False
        keeper.hang(fault.lasts_s)
        return None

    def _hush_keeper(self, fault: SimFault) -> bool | None:
        """Workers can't reach it, for a while; the controller can."""
        if (keeper := self._keeper(fault)) is None:
            return False
        self._for_a_while(fault, keeper, "hushed")
        return None

    def _node(self, fault: SimFault) -> SimNode | None:
        nodes = [n for n in self.world.nodes if n.up and not n.cut and not n.lost]
        return nodes[fault.target % len(nodes)] if nodes else None

    def _keeper(self, fault: SimFault) -> SimKeeper | None:
        node = self._node(fault)
        keeper = None if node is None else node.keeper
        return keeper if keeper is not None and keeper.alive else None

    def _for_a_while(self, fault: SimFault, of: Any, name: str) -> None:
        """``of`` is so until the fault is over; a later one of the kind ends with this one."""
        setattr(of, name, True)
        self.world.after(fault.lasts_s, lambda: setattr(of, name, False))

    def _crash_node(self, fault: SimFault) -> bool | None:
        if (node := self._node(fault)) is None:
            return False
        self.world.lose_node(node, "power")
        self.world.after(fault.lasts_s, self.world.bring_node)
        return None

    def _add_node(self, fault: SimFault) -> None:
        self.world.bring_node()

    def _hang_worker(self, fault: SimFault) -> bool | None:
        running = [w for w in self.world.alive() if not w.hung]
        if not running:
            return False
        worker = running[fault.target % len(running)]
        worker.hung = True
        self.world.after(HANG_TIMEOUT_S, lambda: self.world.watch_hung(worker))
        return None

    def _partition_node(self, fault: SimFault) -> bool | None:
        if (node := self._node(fault)) is None:
            return False
        self.world.cut_node(node)

        def heal() -> None:
            if node.cut:
                self.world.heal_cut(node)
            if node.lost:  # once declared dead, a node does not come back: a new one does
                self.world.bring_node()

        self.world.after(fault.lasts_s, heal)
        return None

    def _drain_node(self, fault: SimFault) -> bool | None:
        node, world = self._node(fault), self.world
        if node is None or node.draining:
            return False
        node.draining = True
        node.deadline_s = deadline_s = world.now_s + fault.lasts_s
        event = NodeDraining(world.now_s, node.id, deadline_s, "preempted")
        controller = world.controller
        world.after(UNNOTICED_S, lambda: world.tell(event, controller))
        world.at(deadline_s, lambda: world.lose_node(node, "preempted"))
        world.at(deadline_s + 2.0, world.bring_node)
        return None

    def _break_collective(self, fault: SimFault) -> bool | None:
        group = next((w.group for w in self.world.members() if w.group), None)
        if group is None:
            return False
        group.fail("a link flapped")
        return None

    def _raise_error(self, fault: SimFault) -> bool | None:
        """The same exception on every rank, as user code's bugs come."""
        world, core = self.world, self.world.core
        raising = [w for w in world.members() if w.works() and w.group and w.unapplied is None]
        if not raising or core.phase != "running":
            return False
        for worker in raising:
            group = worker.group
            assert group is not None
            step = worker.live.step + 1 if worker.live else 1
            worker.send(WorkerRaised(world.now_s, worker.id, group.generation, step, "ValueError"))
            worker.group = None
            group.fail("a peer raised")
        return None

    def _damage_memory(self, fault: SimFault) -> bool | None:
        """Bits rot in the newest snapshot that one worker holds, its own or a peer's."""
        holders = [w for w in self.world.alive() if w.copies]
        if not holders:
            return False
        worker = holders[fault.target % len(holders)]
        newest = max(worker.copies, key=lambda key: (key[0], worker.copies[key].tier is Tier.PEER))
        worker.copies[newest].damaged = True
        return None

    def _damage_checkpoint(self, fault: SimFault) -> bool | None:
        if not self.world.store.published:
            return False
        self.world.store.published[-1].damaged = True
        return None

    def _store_down(self, fault: SimFault) -> None:
        self._for_a_while(fault, self.world.store, "down")

    def _base_away(self, fault: SimFault) -> None:
        self._for_a_while(fault, self.world.store, "base_away")

    def _slow_network(self, fault: SimFault) -> None:
        def fast() -> None:
            self.world.latency_s = self.world.scenario.latency_s

        self.world.latency_s = 2.5
        self.world.after(fault.lasts_s, fast)

    def _request_stop(self, fault: SimFault) -> None:
        world = self.world
        world.stop_requested = True
        world.tell(StopRequested(world.now_s, "someone asked"), world.controller)

    def _resize(self, fault: SimFault) -> bool | None:
        world, policy = self.world, self.world.policy
        worlds = range(policy.min_workers, policy.max_workers + 1, policy.multiple_of)
        workers = worlds[fault.target % len(worlds)]
        if workers == (world.core.target or policy.max_workers):
            return False
        world.ask_for(workers)
        return None

    def _slow_worker(self, fault: SimFault) -> bool | None:
        members = self.world.members()
        if not self.world.policy.evict_stragglers or not members:
            return False
        members[fault.target % len(members)].pace_s = 5.0
        return None

    def _crash_controller(self, fault: SimFault) -> None:
        self.world.crash_controller()

    def _stop_controller(self, fault: SimFault) -> bool:
        return self.world.stop_controller(fault.lasts_s)

    def _kill_controller(self, fault: SimFault) -> bool:
        return self._replace_controller("killed", fault)

    def _halt_controller(self, fault: SimFault) -> bool:
        return self._replace_controller("stopped", fault)

    def _lose_controller(self, fault: SimFault) -> bool:
        return self._replace_controller("lost", fault)

    def _replace_controller(self, how: str, fault: SimFault) -> bool:
        """Workers train on, and the next one adopts them."""
        adoption = self.world.adoption
        return adoption is not None and adoption.go(SimKill(0, how, fault.lasts_s))
