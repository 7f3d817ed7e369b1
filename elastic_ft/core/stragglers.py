"""Who is consistently slower than the others, and whether the world is better off without. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ft.core.measuring import note_eviction, restart_paces
from elastic_ft.core.state import Turn
from elastic_ft.core.world import choose_world

EVICTIONS_MAX = 2  # per node: its successor there was no better
WARM_UP_STEPS = 2  # of a generation, that say nothing of a worker's pace
CONSISTENT = 0.9  # share of the window's steps in which a straggler is slow


@dataclass(frozen=True, slots=True)
class Straggler:
    """``pace_s``, ``typical_s``: its own and the world's, medians over the window."""

    worker: str
    pace_s: float
    typical_s: float
    slow_steps: int
    steps: int


def find_straggler(
    paces: Mapping[str, tuple[float, ...]], factor: float, window: int
) -> Straggler | None:
    """Who is consistently slower than the median by ``factor``; the slowest, if there are several.

    ``paces``: seconds of the same computation on each member, step by step, newest last.
    """
    steps = min(map(len, paces.values()), default=0) - WARM_UP_STEPS
    if len(paces) < 2 or steps < window:
        return None
    recent = {worker: some[-window:] for worker, some in paces.items()}
    typical = [_median([some[i] for some in recent.values()]) for i in range(window)]
    found = []
    for worker, some in sorted(recent.items()):
        slow = sum(pace > factor * usual for pace, usual in zip(some, typical, strict=True))
        if slow >= CONSISTENT * window:
            found.append(Straggler(worker, _median(some), _median(typical), slow, window))
    return max(found, key=lambda straggler: straggler.pace_s, default=None)


def _median(values: Sequence[float]) -> float:
    """The lower one of two: of two workers, the faster is the measure."""
    return sorted(values)[(len(values) - 1) // 2]


def judge_stragglers(turn: Turn) -> str:
    """Why somebody who holds all others up is to leave; empty if nobody is. The evidence is
    journalled, for one that is kept as well."""
    policy, state, paces = turn.policy, turn.state, turn.state.measured.paces
    if paces.keys() != state.ranks.keys():
        return ""
    found = find_straggler(paces, policy.straggler_factor, policy.straggler_window_steps)
    if found is None:
        return ""
    node = state.ready[found.worker].node
    why = (
        f"{found.worker} takes {found.pace_s * 1e3:.2f} ms for what takes the others "
        f"{found.typical_s * 1e3:.2f} ms, in {found.slow_steps} of {found.steps} steps"
    )
    fields = {"worker": found.worker, "node": node, "rank": state.ranks[found.worker]}
    fields |= {"pace_s": found.pace_s, "typical_s": found.typical_s}
    restart_paces(turn)
    turn.set(leaving={**state.leaving, found.worker: why})
    kept = ""
    if state.measured.evicted.count(node) >= EVICTIONS_MAX:
        kept = f"{EVICTIONS_MAX} workers of {node} were evicted before"
    elif isinstance(world := choose_world(turn), str):
        kept = world
    elif found.worker in {m.worker for m in world.members}:
        kept = "leaving it out would fall below min_workers"
    if kept:
        turn.set(leaving=state.leaving)
        turn.journal("straggler_kept", f"{why}; {kept}", **fields)
        return ""
    turn.journal("straggler_evicted", why, **fields)
    note_eviction(turn, node)
    return why
