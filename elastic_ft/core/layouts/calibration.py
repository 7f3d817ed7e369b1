"""What devices really reach, from the steps of a running job. Pure.

The time model has one constant that matters most, the rate of large products. It is set so that
the model predicts what was measured in the layout that the job has: layouts are then compared by
a rate that this job on these devices reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.planner import CHUNKS, Limits
from elastic_ft.core.layouts.time_costs import Interconnect, step_time
from elastic_ft.core.layouts.work import Choice, Devices, Work

STEPS_MIN, STEPS_MAX = 8, 50  # so many steps are a measurement; the last ones count
RATES = 1e6, 1e18  # operations per second: no device is beyond
HALVINGS = 60  # of the ratio between the two


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of one step, measured and as they were predicted, and the rate that explains them."""

    layout: Layout
    measured_s: float
    predicted_s: float
    flops_per_s: float | None  # None: communication alone would take longer

    def __str__(self) -> str:
        found = (
            f"devices reach {self.flops_per_s / 1e12:.3g} TFLOP/s"
            if self.flops_per_s
            else "communication is slower in the model than here"
        )
        return (
            f"{self.layout} takes {self.measured_s:.4g} s a step, {self.predicted_s:.4g} s "
            f"predicted: {found}"
        )


def calibrate(
    work: Work, devices: Devices, limits: Limits, layout: Layout, steps_s: Sequence[float]
) -> Calibration | None:
    """Returns what the steps tell, or None if they are too few.

    ``devices``: those in use, node by node. ``limits``: with one micro-batch size, one schedule.
    """
    if len(steps_s) < STEPS_MIN:
        return None
    schedule = limits.schedules[0]
    choice = Choice(
        layout,
        limits.micro_batches[0],
        limits.recompute[0],
        schedule,
        CHUNKS.get(schedule, 1) if layout.has_stages else 1,
    )

    def predicted_s(flops_per_s: float) -> float:
        there = replace(devices, flops_per_s=flops_per_s)
        return step_time(work, choice, Interconnect.of(there, there.nodes)).total

    measured_s = median(steps_s[-STEPS_MAX:])
    low, high = RATES
    rate = None
    if predicted_s(high) < measured_s < predicted_s(low):
        for _ in range(HALVINGS):
            middle = sqrt(low * high)
            low, high = (middle, high) if predicted_s(middle) > measured_s else (low, middle)
        rate = sqrt(low * high)
    return Calibration(layout, measured_s, predicted_s(devices.flops_per_s), rate)
