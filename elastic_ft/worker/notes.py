"""What a worker's loop has to say for the journal: (reason, fields) of an event."""

from __future__ import annotations

from typing import Any

from elastic_ft.core.intervals import Cadence
from elastic_ft.engines.base import Compiled
from elastic_ft.state.tensors import LocalState

LoopNote = tuple[str, dict[str, Any]]


def note_on_cadence(chosen: Cadence) -> LoopNote:
    every, cost_s, step_s = chosen.every, chosen.cost_s, chosen.step_s
    reason = (
        f"a snapshot costs {cost_s * 1e3:.1f} ms, a step takes {step_s * 1e3:.0f} ms: one "
        f"every {every} steps is {cost_s / (step_s * every):.1%} of the time"
    )
    fields = {"every_steps": every, "cost_s": round(cost_s, 6), "step_s": round(step_s, 6)}
    return reason, fields


def note_on_compiling(step: int, found: Compiled, worker: str) -> LoopNote:
    """Of each worker once, and whenever a step had to compile."""
    reason = f"{found.graphs} graphs of layers compiled in step {step}"
    if found.warmed:
        reason += f", {found.warmed} before the worker was ready ({found.warmed_s:.1f} s)"
    fields: dict[str, Any] = {"step": step, "graphs": found.graphs, "warmed": found.warmed}
    return reason, fields | {"warmed_s": round(found.warmed_s, 3), "worker": worker}


def note_on_memory(state: LocalState, held_bytes: int, rank: int | None) -> LoopNote:
    own = sum(t.local.numel() * t.local.element_size() for t in state.values())
    fields = {"state_bytes": own, "snapshot_bytes": held_bytes, "rank": rank}
    reason = f"snapshots take {held_bytes / max(own, 1):.2f} bytes per byte of this rank's state"
    return reason, fields
