"""What workers say of their model and of each step's time, kept as long as it decides something.

Layouts are planned by it, and stragglers found. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from elastic_ft.core.assignment import NodeId
from elastic_ft.core.events import StepApplied
from elastic_ft.core.layouts.calibration import STEPS_MAX, as_measured, calibrate
from elastic_ft.core.layouts.layout import EXPERTS_MAX
from elastic_ft.core.layouts.planner import Planning
from elastic_ft.core.layouts.work import Devices
from elastic_ft.core.records import Measured
from elastic_ft.core.state import Turn, is_current
from elastic_ft.core.table import Table


def note_experts(turn: Turn, experts: int) -> None:
    """What a worker says of its model: all have the same."""
    if 0 < experts <= EXPERTS_MAX:
        turn.set(measured=replace(turn.state.measured, experts=experts))


def note_step(turn: Turn, event: StepApplied) -> None:
    """What a member of the running generation says of a step's time, where it decides something."""
    policy, state, known = turn.policy, turn.state, turn.state.measured
    if policy.planning is None and not policy.evict_stragglers:
        return
    rank = state.ranks.get(event.worker)
    if state.phase != "running" or rank is None:
        return
    if not is_current(turn, event.worker, event.generation):
        return
    if policy.planning is not None and rank == 0 and event.took_s:
        known = replace(known, steps_s=(*known.steps_s, event.took_s)[-STEPS_MAX:])
    if policy.planning is not None and event.took_s and "links_s" in event.spent:
        known = _with_wait(known, event.step, event.spent["links_s"] / event.took_s)
    if policy.evict_stragglers and event.pace_s:
        kept = policy.straggler_window_steps * 2
        paces = (*known.paces.get(event.worker, ()), event.pace_s)[-kept:]
        known = replace(known, paces=known.paces.put(event.worker, paces))
    if known is not state.measured:
        turn.set(measured=known)


def _with_wait(known: Measured, step: int, share: float) -> Measured:
    """The least of all ranks': who comes last waits for links alone, the others for it, too."""
    waits = dict(known.least_waits)
    if share >= waits.get(step, math.inf):
        return known
    return replace(known, least_waits=tuple({**waits, step: share}.items())[-STEPS_MAX:])


def restart_paces(turn: Turn) -> None:
    """What was seen until now says nothing of the steps to come."""
    turn.set(measured=replace(turn.state.measured, paces=Table()))


def note_eviction(turn: Turn, node: NodeId) -> None:
    known = turn.state.measured
    turn.set(measured=replace(known, evicted=(*known.evicted, node)))


def measured_devices(turn: Turn, planning: Planning) -> Devices:
    known = turn.state.measured
    return as_measured(planning.devices, known.flops_per_s, known.links)


def learn_rate(turn: Turn) -> None:
    """What the generation that ends has shown of its devices and links: the next layout is planned
    by it."""
    planning, old, known = turn.policy.planning, turn.state.assignment, turn.state.measured
    turn.set(measured=replace(known, steps_s=(), least_waits=()))
    if planning is None or old is None:
        return
    counts = tuple(Counter(member.node for member in old.members).values())
    devices = replace(measured_devices(turn, planning), nodes=counts)
    steps = known.steps_s, tuple(share for _, share in known.least_waits)
    found = calibrate(planning.work, devices, planning.limits, old.layout, *steps)
    if found is None:
        return
    links = known.links if found.links is None else (known.links or 1.0) * found.links
    flops_per_s = found.flops_per_s or known.flops_per_s
    turn.set(measured=replace(turn.state.measured, flops_per_s=flops_per_s, links=links))
    turn.journal(
        "calibrated",
        str(found),
        layout=str(found.layout),
        measured_s=found.measured_s,
        predicted_s=found.predicted_s,
        flops_per_s=found.flops_per_s,
        waited_s=found.waited_s,
        links=links,
    )
