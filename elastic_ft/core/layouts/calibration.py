"""What devices and links really reach, from the steps of a running job. Pure.

The time model has one constant that matters most, the rate of large products. It is set so that
the model predicts what was measured in the layout that the job has: layouts are then compared by
a rate that this job on these devices reaches. Where it was also measured for how much of a step
computing waits for others, what is left says the rate, and the waits say the bandwidth of links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.planner import CHUNKS, Limits
from elastic_ft.core.layouts.time_costs import Interconnect, StepTime, step_time
from elastic_ft.core.layouts.work import Choice, Devices, Work

STEPS_MIN, STEPS_MAX = 8, 50  # so many steps are a measurement; the last ones count
WAITS_MIN = 2  # so many steps in which waits were measured
RATES = 1e6, 1e18  # operations per second: no device is beyond
LINKS = 1e-9, 1e3  # times the bandwidths assumed
HALVINGS = 60  # of the ratio between the two
# Kinds of waits that links make (``groups.waits``). In others ranks wait for slower ones, for their
# turn in a pipeline, or for copies.
OF_LINKS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"),
    "tensor_parallel",
)


def on_links(exposed_s: Mapping[str, float]) -> float:
    """Of a step's exposed seconds, by kind, those that bandwidths decide."""
    return sum(exposed_s.get(kind, 0.0) for kind in OF_LINKS)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of one step, measured and as they were predicted, and what explains them.

    Attributes:
        flops_per_s: None: communication alone would take longer.
        waited_s: of the step, for links; None where that was not measured.
        links: times the bandwidths that were assumed; None: nothing says so.
    """

    layout: Layout
    measured_s: float
    predicted_s: float
    flops_per_s: float | None
    waited_s: float | None = None
    links: float | None = None

    def __str__(self) -> str:
        found = (
            f"devices reach {self.flops_per_s / 1e12:.3g} TFLOP/s"
            if self.flops_per_s
            else "communication is slower in the model than here"
        )
        if self.waited_s is not None:
            found += f", {self.waited_s:.3g} s are waited for links"
        if self.links is not None:
            found += f", which reach {self.links:.3g} times what was assumed"
        return (
            f"{self.layout} takes {self.measured_s:.4g} s a step, {self.predicted_s:.4g} s "
            f"predicted: {found}"
        )


def as_measured(devices: Devices, flops_per_s: float | None, links: float | None) -> Devices:
    """``devices`` as they were measured, where they were."""
    times = links or 1.0
    return replace(
        devices,
        flops_per_s=flops_per_s or devices.flops_per_s,
        intra_bytes_per_s=devices.intra_bytes_per_s * times,
        inter_bytes_per_s=devices.inter_bytes_per_s * times,
    )


def calibrate(
    work: Work,
    devices: Devices,
    limits: Limits,
    layout: Layout,
    steps_s: Sequence[float],
    waited: Sequence[float] = (),
) -> Calibration | None:
    """Returns what the steps tell, or None if they are too few.

    Args:
        devices: those in use, node by node.
        limits: with one micro-batch size, one schedule.
        waited: shares of some steps' time that were waited for links: of all ranks' the least, as
            the others' are waits for slower ranks, too.
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

    def predicted(flops_per_s: float, links: float = 1.0) -> StepTime:
        there = as_measured(devices, flops_per_s, links)
        return step_time(work, choice, Interconnect.of(there, there.nodes))

    measured_s = median(steps_s[-STEPS_MAX:])
    expected_s = predicted(devices.flops_per_s).total
    if len(waited) < WAITS_MIN:
        rate = _solved(lambda rate: predicted(rate).total, measured_s, RATES)
        return Calibration(layout, measured_s, expected_s, rate)
    waited_s = median(waited) * measured_s
    computed_s = measured_s - waited_s
    rate = _solved(lambda rate: predicted(rate).without_links, computed_s, RATES)
    links = None
    if rate is not None:
        links = _solved(lambda links: predicted(rate, links).on_links, waited_s, LINKS)
    return Calibration(layout, measured_s, expected_s, rate, waited_s, links)


def _solved(
    falls: Callable[[float], float], wanted: float, between: tuple[float, float]
) -> float | None:
    """Where what ``falls`` has the value that is wanted; None if nowhere."""
    low, high = between
    if not falls(high) < wanted < falls(low):
        return None
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if falls(middle) > wanted else (low, middle)
    return sqrt(low * high)
