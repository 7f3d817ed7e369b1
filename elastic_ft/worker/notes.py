"""What a worker tells the journal of its steps: the reason in words, and the fields."""

from __future__ import annotations

from typing import Any

from elastic_ft.core.intervals import Cadence
from elastic_ft.engines.base import Compiled

NoteParts = tuple[str, dict[str, Any]]


def of_cadence(cadence: Cadence) -> NoteParts:
    every, cost_s, step_s = cadence.every, cadence.cost_s, cadence.step_s
    reason = (
        f"a snapshot costs {cost_s * 1e3:.1f} ms, a step takes {step_s * 1e3:.0f} ms: one "
        f"every {every} steps is {cost_s / (step_s * every):.1%} of the time"
    )
    fields = {"every_steps": every, "cost_s": round(cost_s, 6), "step_s": round(step_s, 6)}
    return reason, fields


def of_compiled(step: int, compiled: Compiled, worker: str) -> NoteParts:
    reason = f"{compiled.graphs} graphs of layers compiled in step {step}"
    if compiled.warmed:
        reason += f", {compiled.warmed} before the worker was ready ({compiled.warmed_s:.1f} s)"
    fields = {
        "step": step,
        "graphs": compiled.graphs,
        "warmed": compiled.warmed,
        "warmed_s": round(compiled.warmed_s, 3),
        "worker": worker,
    }
    return reason, fields
