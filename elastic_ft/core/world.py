"""Which of the usable workers make the next world, how they are laid out, and who idles. Pure.

A world is as large as the policy allows: up to ``max_workers``, or what was asked for since, in
multiples where it says so. Workers that do not fit stay warm, and are named with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from elastic_ft.core.assignment import Member, NodeId, Source, Tier
from elastic_ft.core.events import ResizeRequested
from elastic_ft.core.layouts.expert_owners import allot, weigh, with_owners
from elastic_ft.core.layouts.layout import Layout, ShardPlace, plan_layout
from elastic_ft.core.layouts.layout_plan import LayoutPlan, NoLayout
from elastic_ft.core.layouts.moved import Previous
from elastic_ft.core.layouts.planner import Limits, Planning, best
from elastic_ft.core.layouts.work import Devices, Work
from elastic_ft.core.measuring import measured_devices
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import Turn

WINDOW_S = 600.0  # in which changes of membership are counted
ASSUMED_PAUSE_S = 5.0  # of a planned change, before one was measured
PAUSES = 5  # the last ones measured count


@dataclass(frozen=True, slots=True)
class World:
    """The next world. ``idle``: workers that could be in it and have no rank."""

    members: tuple[Member, ...]  # index = rank
    layout: Layout
    why: str
    idle: tuple[Member, ...] = ()
    why_idle: str = ""


def choose_world(turn: Turn) -> World | str:
    """Returns the world that the usable workers make, or why they make none."""
    usable, policy = turn.usable(), turn.policy
    count = len(usable) // policy.multiple_of * policy.multiple_of
    if count < policy.min_workers:
        return f"too few workers are usable, {len(usable)}: min_workers is {policy.min_workers}"
    return _planned(turn, usable) if policy.planning else _by_rule(policy, usable, count)


def _by_rule(policy: Policy, usable: Sequence[Member], count: int) -> World:
    layout, why = plan_layout(policy, count)
    ordered = _inside_nodes(usable, layout.ranks_together)
    why_idle = f"worlds are multiples of {policy.multiple_of}" * (count < len(usable))
    return World(ordered[:count], layout, why, ordered[count:], why_idle)


def _inside_nodes(members: Sequence[Member], together: int) -> tuple[Member, ...]:
    """In rank order where each works alone; else those who work together share one if any can."""
    if together == 1:
        return tuple(members)
    grouped: list[Member] = []
    for on_node in by_node(members).values():
        grouped += on_node[: len(on_node) // together * together]
    taken = {member.worker for member in grouped}
    return (*grouped, *(member for member in members if member.worker not in taken))


def by_node(members: Iterable[Member]) -> dict[NodeId, list[Member]]:
    nodes: dict[NodeId, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member)
    return nodes


def _planned(turn: Turn, members: Sequence[Member]) -> World | str:
    """As the planner finds best for these devices; near equals by what need not move."""
    planning, nodes = turn.policy.planning, by_node(members)
    assert planning is not None
    placed = [member for on_node in nodes.values() for member in on_node]
    devices = replace(
        measured_devices(turn, planning),
        nodes=tuple(map(len, nodes.values())),
        memory_bytes=_memory_bytes(planning, placed),
    )
    previous = None
    if (old := turn.state.assignment) is not None:
        ranks = tuple(turn.state.ranks.get(member.worker) for member in placed)
        previous = Previous(old.layout, ranks)
    plan = _best(planning.work, devices, _limits(turn.policy), previous)
    if isinstance(plan, str):
        return plan
    chosen = tuple(placed[device] for device in plan.devices)
    idle = tuple(member for member in placed if member not in chosen)
    why = f"planned {plan.layout}: {'; '.join(plan.why)}"
    return World(chosen, plan.layout, why, idle, "the plan has no rank for it" * bool(idle))


@lru_cache(maxsize=16)  # asked with every event of who might join, and again as a world forms
def _best(
    work: Work, devices: Devices, limits: Limits, previous: Previous | None
) -> LayoutPlan | str:
    """Or why there is none."""
    try:
        return best(work, devices, limits, previous)
    except NoLayout as error:
        return str(error)


def deal_experts(turn: Turn, world: World, source: Source) -> World:
    """Where ranks share experts out: who has which, so that the least of ``source`` is moved."""
    layout, experts = world.layout, turn.state.measured.experts
    if not layout.shares_experts or not experts:
        return world
    former = Layout.of_shard_space(source.space) if source.space else Layout()
    ranks = {member.worker: rank for rank, member in enumerate(world.members)}
    held = [
        (ranks[worker], ShardPlace.parse(shard), tier is Tier.LIVE)
        for shard, holders in source.holders.items()
        for worker, tier in dict(reversed(holders)).items()  # the nearest is first
        if worker in ranks
    ]
    weights = weigh(experts, layout, former, held)
    owners = allot(weights)
    why = world.why
    if held:
        new = sum(not weights[owner][expert] for expert, owner in enumerate(owners))
        why += f", of which {new} of {experts} go to ranks that have nothing of them"
    return replace(world, layout=with_owners(layout, owners), why=why)


def _limits(policy: Policy) -> Limits:
    assert policy.planning is not None
    return replace(
        policy.planning.limits, world_min=policy.min_workers, multiple_of=policy.multiple_of
    )


def _memory_bytes(planning: Planning, members: Iterable[Member]) -> float:
    """Of the smallest device: what fits there fits everywhere."""
    if planning.memory_bytes is not None:
        return planning.memory_bytes
    known = [member.memory_bytes for member in members if member.memory_bytes]
    return min(known, default=planning.devices.memory_bytes)


def joiners(turn: Turn) -> list[Member]:
    """Who would make the world larger, or take the place of a member that is about to go."""
    world = choose_world(turn)
    staying = [member for member in turn.members if not turn.is_leaving(member)]
    if isinstance(world, str) or len(world.members) <= len(staying):
        return []
    return [member for member in world.members if member.worker not in turn.state.ranks]


def has_joiners(turn: Turn) -> bool:
    """Whether ``joiners`` has any: of worlds made by rule, their size alone says so."""
    state, each = turn.state, turn.policy.multiple_of
    if turn.policy.planning is None and not state.draining and not state.leaving:
        count = turn.count_usable() // each * each
        return len(turn.members) < count >= turn.policy.min_workers
    return bool(joiners(turn))


def why_idle(turn: Turn, world: World) -> dict[str, str]:
    """Those ready without a rank, and why; who is about to go is not among them."""
    fit = {member.worker for member in world.members}
    unfit = {member.worker for member in world.idle}
    return {
        member.worker: world.why_idle if member.worker in unfit else "a spare"
        for member in turn.state.ready.values()
        if member.worker not in fit and not turn.is_leaving(member)
    }


def surplus(turn: Turn, inside: Set[str]) -> list[Member]:
    """Workers that are more than was asked for; those that never had a rank stay as spares."""
    if turn.state.target is None:
        return []
    ranks = turn.state.ranks if turn.state.episode is None else _ranks_before(turn)
    idle = [m for m in turn.state.ready.values() if m.worker not in inside]
    idle = [m for m in idle if not turn.is_leaving(m)]
    idle.sort(key=lambda m: ranks.get(m.worker, -1))
    return idle[max(0, wanted(turn) - len(inside)) :]


def _ranks_before(turn: Turn) -> dict[str, int]:
    assert turn.state.episode is not None
    return {m.worker: rank for rank, m in enumerate(turn.state.episode.before.members)}


def wanted(turn: Turn) -> int:
    """Workers to keep alive."""
    return turn.workers_max + turn.policy.spares


def why_not_resized(turn: Turn, event: ResizeRequested) -> str:
    """Why the world can't be made of so many; empty if it can."""
    policy = turn.policy
    if not policy.min_workers <= event.workers <= policy.max_workers:
        return (
            f"{event.workers} workers: min_workers is {policy.min_workers}, "
            f"max_workers {policy.max_workers}"
        )
    if event.workers % policy.multiple_of:
        return f"{event.workers} workers: worlds are multiples of {policy.multiple_of}"
    if policy.planning is None:
        return ""
    memory_bytes = _memory_bytes(policy.planning, turn.state.ready.values())
    devices = replace(policy.planning.devices, nodes=(event.workers,), memory_bytes=memory_bytes)
    plan = _best(policy.planning.work, devices, _limits(policy), None)
    return plan if isinstance(plan, str) else ""


# ----------------------------------------------------------------------------- regrowth


def why_wait(turn: Turn, after: int) -> str:
    """Why growing to ``after`` workers is not worth its pause now; empty if it is.

    A pause costs the steps of the present world in that time; more workers repay it at the rate
    by which they are faster. It must be repaid before the next loss is to be expected.
    """
    state, before = turn.state, len(turn.members)
    replaces = any(turn.is_leaving(member) for member in turn.members)
    asked = state.target is not None and before < state.target
    if before >= after or replaces or asked:
        return ""
    since_s = turn.at_s if state.deferred_at_s is None else state.deferred_at_s
    if turn.at_s - since_s >= turn.policy.regrow_delay_max_s:
        return ""
    pauses = [r.paused_s for r in state.recoveries[-PAUSES:]]
    pause_s = sum(pauses) / len(pauses) if pauses else ASSUMED_PAUSE_S
    recent = [r for r in state.recoveries if turn.at_s - r.noticed_at_s < WINDOW_S]
    losses = sum(r.cause not in ("worker_joined", "resized") for r in recent)
    between_s = WINDOW_S / losses if losses else turn.policy.regrow_repaid_s
    repaid_s = pause_s / (after / before - 1)
    within_s = min(between_s, turn.policy.regrow_repaid_s)
    if repaid_s <= within_s:
        return ""
    return (
        f"growing from {before} to {after} workers pauses for about {pause_s:.1f} s, which takes "
        f"{repaid_s:.0f} s to repay; it should within {within_s:.0f} s: {losses} losses in the "
        f"last {WINDOW_S:.0f} s"
    )
