"""Goodput of a fleet over days: what failures cost three ways of living with them. Pure, seeded.

A unit is the smallest part of the fleet that can train on without the rest: one model replica, or
one node where a node holds a replica or a shard that others have too. What fails takes its unit
along, and the unit comes back some time later. Goodput is useful unit-seconds over those of the
whole fleet: what is lost to pauses, to work done again and to units that are away.

``elastic_ft`` here is the real core, told of every loss, safe point and resumption, obeyed in all
it commands; ``restart_all`` and ``replica_drop`` are models of torchrun's and torchft's ways.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Holding, Member, Tier
from elastic_ft.core.intervals import checkpoint_every_s
from elastic_ft.core.membership import step as core_step
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things take. Where each default comes from: ``SOURCES``."""

    step_s: float = 6.0
    notice_s: float = 0.1
    form_s: float = 20.0
    collective_timeout_s: float = 60.0
    restart_s: float = 300.0
    checkpoint_stall_s: float = 5.0
    start_s: float = 60.0


SOURCES = {
    "step_s": "Llama 3 405B: 16 M tokens a step on 16,384 GPUs at about 400 TFLOP/s each",
    "notice_s": "measured at 4 workers, with room: a killed worker's connection ends in 12 ms",
    "form_s": "assumed: thousands of ranks form groups, state moves (elastic_ft and replica-drop)",
    "collective_timeout_s": "torchft's default; survivors wait for it (its issue 164)",
    "restart_s": "assumed: schedule, start, import, form, load a checkpoint, on every node",
    "checkpoint_stall_s": "assumed, of restart-all; its interval is Young and Daly's best",
    "start_s": "assumed: a unit that is back starts its processes, while the rest trains",
}


@dataclass(frozen=True, slots=True)
class Failure:
    at_s: float
    unit: int
    back_at_s: float  # with its processes up


@dataclass(frozen=True, slots=True)
class FailureRate:
    """``per_day``: events, each taking ``share`` of all units (at least one) for ``away_s``."""

    name: str
    per_day: float
    share: float
    away_s: float
    source: str


def units_of(gpus: int) -> int:
    """A node of 8 GPUs each, or where that makes more than 128, as many as Llama 3 had replicas."""
    return gpus // max(8, gpus // 128)


def llama3_failures(gpus: int, away_s: float = 600.0) -> FailureRate:
    """Each event takes one unit; as many per GPU and day as Meta reports."""
    per_day = 419 / 54 * gpus / 16_384
    source = "419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models)"
    return FailureRate("llama3", per_day, 0.0, away_s, source)


def spot(away_s: float = 1800.0) -> FailureRate:
    """Bulk removals, of the same share of any fleet."""
    source = "79 removals of 8.7 % of the nodes in 11.4 h (bamboo's AWS p3 trace); away_s assumed"
    return FailureRate("spot", 79 / 11.37 * 24, 0.087, away_s, source)


def failures(
    rate: FailureRate, units: int, days: float, start_s: float, seed: int
) -> list[Failure]:
    """In order of time; only of units that are up. What goes together comes back together."""
    rng = random.Random(f"fleet {rate.name} {units} {seed}")
    found, back = [], [0.0] * units
    at_s = rng.expovariate(rate.per_day) * DAY_S
    while at_s < days * DAY_S:
        there = [unit for unit in range(units) if back[unit] <= at_s]
        count = max(1, round(rate.share * units))
        back_s = at_s + rng.uniform(0.5, 1.5) * rate.away_s + start_s
        for unit in rng.sample(there, min(count, len(there) - 1)):
            back[unit] = back_s
            found.append(Failure(at_s, unit, back[unit]))
        at_s += rng.expovariate(rate.per_day) * DAY_S
    return found


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Shares of the fleet's unit-seconds; they add up to 1."""

    system: str
    goodput: float
    away: float  # units that are not there, or there and not yet part of the world
    paused: float  # units that wait
    redone: float  # work that was lost and done again
    checkpoints: float
    interruptions: int
    core_events: int = 0


@dataclass(slots=True)
class Account:
    """Unit-seconds, as a run goes on."""

    units: int
    useful: float = 0.0
    paused: float = 0.0
    redone: float = 0.0
    checkpoints: float = 0.0
    interruptions: int = 0

    def outcome(self, system: str, duration_s: float, core_events: int = 0) -> FleetOutcome:
        whole = self.units * duration_s
        shares = [self.useful / whole, self.paused / whole]
        shares += [self.redone / whole, self.checkpoints / whole]
        away = max(0.0, 1.0 - sum(shares))
        useful, paused, redone, checkpoints = shares
        return FleetOutcome(
            system, useful, away, paused, redone, checkpoints, self.interruptions, core_events
        )


def _changes(losses: list[Failure], end_s: float) -> Iterator[tuple[float, int]]:
    """(when, +-units), in order."""
    found: dict[float, int] = {}
    for loss in losses:
        found[loss.at_s] = found.get(loss.at_s, 0) - 1
        found[loss.back_at_s] = found.get(loss.back_at_s, 0) + 1
    for at_s in sorted(found):
        if at_s < end_s:
            yield at_s, found[at_s]


# ---------------------------------------------------------------------------- restart-all


def restart_all(losses: list[Failure], units: int, days: float, costs: Costs) -> FleetOutcome:
    """As torchrun: at every loss and every return all processes start again from a checkpoint."""
    end_s, account = days * DAY_S, Account(units)
    between_s = end_s / max(1, len({loss.at_s for loss in losses}))
    every_s = checkpoint_every_s(costs.checkpoint_stall_s, between_s)
    stall = costs.checkpoint_stall_s / (every_s + costs.checkpoint_stall_s)
    there, now_s, ready_s = units, 0.0, 0.0
    for at_s, change in [*_changes(losses, end_s), (end_s, 0)]:
        account.paused += there * (min(at_s, max(ready_s, now_s)) - now_s)
        ran_s = max(0.0, at_s - max(now_s, ready_s))
        # What is newer than the last checkpoint is lost, unless the run just ends.
        cycle_s = every_s + costs.checkpoint_stall_s
        lost_s = ran_s % cycle_s if at_s < end_s else 0.0
        account.redone += there * min(lost_s, every_s)
        account.checkpoints += there * ((ran_s - lost_s) * stall + max(0.0, lost_s - every_s))
        account.useful += there * (ran_s - lost_s) * (1 - stall)
        there, now_s, ready_s = there + change, at_s, at_s + costs.notice_s + costs.restart_s
        account.interruptions += change < 0
    return account.outcome("restart-all", end_s)


# --------------------------------------------------------------------------- replica-drop


def replica_drop(losses: list[Failure], units: int, days: float, costs: Costs) -> FleetOutcome:
    """As torchft: survivors wait for the collective's timeout, then go on with one replica less.

    The step under way is lost. A replica that is back heals from a peer while all others wait.
    """
    end_s, account = days * DAY_S, Account(units)
    there, now_s, ready_s = units, 0.0, 0.0
    for at_s, change in [*_changes(losses, end_s), (end_s, 0)]:
        account.paused += there * (min(at_s, max(ready_s, now_s)) - now_s)
        ran_s = max(0.0, at_s - max(now_s, ready_s))
        lost_s = ran_s % costs.step_s if change < 0 else 0.0
        account.useful += there * (ran_s - lost_s)
        account.redone += there * lost_s
        wait_s = costs.form_s + (costs.collective_timeout_s if change < 0 else 0.0)
        there, now_s = there + change, at_s
        ready_s = max(ready_s, at_s + wait_s) if change else ready_s
        account.interruptions += change < 0
    return account.outcome("replica-drop", end_s)


# ----------------------------------------------------------------------------- elastic_ft


@dataclass(slots=True)
class _Fleet:
    """The real core under a virtual clock, with one worker per unit.

    Between two changes of membership one step stands for all: the core is told of it, so that it
    knows of progress, and the account takes the time for what it was.
    """

    costs: Costs
    units: int
    policy: Policy
    account: Account
    state: State = field(default_factory=State)
    now_s: float = 0.0
    events: int = 0
    trains_since_s: float | None = None  # the world's last resumption, while it trains
    counted_s: float = 0.0  # until then the account is right
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (at_s, self.count, act))

    def tell(self, event: ev.Event) -> None:
        self.events += 1
        self.state, commands = core_step(self.state, event, self.policy)
        for command in commands:
            match command:
                case cmd.StartTimer(timer, generation, after_s):
                    fired = self._fired(timer, generation)
                    self.at(self.now_s + after_s, fired)
                case cmd.PauseWorkers():
                    self._pause(command)
                case cmd.FormGeneration():
                    self._form(command)
                case cmd.ReleaseWorker():
                    raise AssertionError(f"{command}: nobody leaves here")
                case cmd.FinishJob():
                    raise AssertionError(f"the core gave up: {command.reason}")
                case _:
                    pass

    def _fired(self, timer: str, generation: int) -> Callable[[], None]:
        return lambda: self.tell(ev.TimerFired(self.now_s, timer, generation))

    @property
    def world(self) -> int:
        return len(self.state.assignment.members) if self.state.assignment else 0

    def step_s(self) -> float:
        """The same global batch on fewer units."""
        return self.costs.step_s * self.units / max(1, self.world)

    def settle(self, *, lose_step: bool) -> None:
        """Accounts for the time since the last change; a broken step counts as lost."""
        elapsed_s, world = self.now_s - self.counted_s, self.world
        alive = sum(m.worker in self.state.ready for m in self._members())
        if self.trains_since_s is None:
            self.account.paused += alive * elapsed_s
        else:
            lost_s = (self.now_s - self.trains_since_s) % self.step_s() if lose_step else 0.0
            lost_s = min(lost_s, elapsed_s)
            self.account.useful += world * (elapsed_s - lost_s)
            self.account.redone += world * lost_s
        self.counted_s = self.now_s

    def _members(self) -> tuple[Member, ...]:
        return self.state.assignment.members if self.state.assignment else ()

    def _pause(self, command: cmd.PauseWorkers) -> None:
        """At once, or at the end of the step under way."""
        pause_s = 0.0
        if not command.abort and self.trains_since_s is not None:
            done_s = (self.now_s - self.trains_since_s) % self.step_s()
            pause_s = self.step_s() - done_s
        self.at(self.now_s + pause_s, lambda: self._paused(command))

    def _paused(self, command: cmd.PauseWorkers) -> None:
        if command.generation != self.state.generation or self.state.phase != "pausing":
            return
        self.settle(lose_step=command.abort)
        self.trains_since_s = None
        assignment = self.state.assignment
        for worker in command.workers:
            if worker not in self.state.ready or assignment is None:
                continue
            if (rank := assignment.rank_of(worker)) is None:
                continue
            layout, step = assignment.layout, self.state.committed
            generation = assignment.computed_by(step)
            held = Holding(step, layout.shard_space, layout.shard_of(rank), Tier.LIVE, generation)
            self.tell(ev.Paused(self.now_s, worker, command.generation, (held,)))

    def _form(self, command: cmd.FormGeneration) -> None:
        self.settle(lose_step=False)
        generation, members = command.assignment.generation, command.assignment.members

        def formed() -> None:
            if self.state.generation != generation or self.state.phase != "forming":
                return
            self.settle(lose_step=False)
            source_step = command.assignment.source.step
            for member in members:
                self.tell(ev.Resumed(self.now_s, member.worker, generation, source_step))
            self.trains_since_s = self.now_s
            self.at(self.now_s + self.step_s(), lambda: self._stepped(generation))

        self.at(self.now_s + self.costs.form_s, formed)

    def _stepped(self, generation: int) -> None:
        if self.state.generation != generation or self.state.phase != "running":
            return
        step = self.state.committed + 1
        assert self.state.assignment is not None
        assignment = self.state.assignment
        for rank, member in enumerate(assignment.members):
            self.tell(ev.StepApplied(self.now_s, member.worker, generation, step))
            if rank in assignment.holding:
                self.tell(ev.StepHeld(self.now_s, member.worker, generation, step))


def elastic_ft(losses: list[Failure], units: int, days: float, costs: Costs) -> FleetOutcome:
    """What this project's core decides, with its default policy."""
    end_s, account = days * DAY_S, Account(units)
    policy = Policy(
        min_workers=1,
        max_workers=units,
        suspend_timeout_s=math.inf,
        form_timeout_s=max(60.0, 3 * costs.form_s),
        boundary_timeout_s=1e4,
        max_generations_without_progress=1000,
    )
    fleet = _Fleet(costs, units, policy, account)
    names = [f"u{unit}.0" for unit in range(units)]
    lives = [0] * units

    def ready(unit: int) -> None:
        names[unit] = f"u{unit}.{lives[unit]}"
        member = Member(names[unit], f"n{unit}", f"n{unit}", unit)
        fleet.tell(ev.WorkerReady(fleet.now_s, member))

    def lost(unit: int) -> None:
        worker, lives[unit] = names[unit], lives[unit] + 1
        if worker in fleet.state.ranks:  # else nobody waits for it
            fleet.settle(lose_step=True)
            fleet.trains_since_s = None
        notice_s = fleet.now_s + costs.notice_s
        fleet.at(notice_s, lambda: fleet.tell(ev.WorkerLost(fleet.now_s, worker, "lost")))

    fleet.tell(ev.JobStarted(0.0))
    for unit in range(units):
        ready(unit)
    for loss in losses:
        fleet.at(loss.at_s, lambda unit=loss.unit: lost(unit))  # type: ignore[misc]
        fleet.at(loss.back_at_s, lambda unit=loss.unit: ready(unit))  # type: ignore[misc]
    while fleet.queue and fleet.queue[0][0] < end_s:
        fleet.now_s, _, act = heapq.heappop(fleet.queue)
        act()
    fleet.now_s = end_s
    fleet.settle(lose_step=False)
    account.interruptions = len({loss.at_s for loss in losses})
    return account.outcome("elastic_ft", end_s, fleet.events)


SYSTEMS = (restart_all, replica_drop, elastic_ft)


def compare_ways(
    rate: FailureRate, units: int, days: float, costs: Costs, seed: int
) -> list[FleetOutcome]:
    """The same failures to all three."""
    losses = failures(rate, units, days, costs.start_s, seed)
    return [system(losses, units, days, costs) for system in SYSTEMS]
