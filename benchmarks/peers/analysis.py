"""From step logs to figures, the same way for every system. Standard library only.

``attempt`` tells apart the worlds that a system forms one after the other: a generation, a
rendezvous, a quorum. ``at_s`` is when the first rank had applied the step (for elastic_ft, when it
was committed: when all ranks had).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

SETTLED_STEPS = 20  # before a fault: their median is the time of a step


@dataclass(frozen=True, slots=True)
class Line:
    """One step, as one rank applied it. ``loss`` is the sum over ``tokens``."""

    at_s: float
    step: int
    attempt: int
    world: int
    rank: int
    pid: int
    loss: float
    tokens: int
    samples: tuple[int, ...] = ()

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.tokens)


def _merged(one: Line, other: Line) -> Line:
    return replace(
        one,
        at_s=min(one.at_s, other.at_s),
        loss=one.loss + other.loss,
        tokens=one.tokens + other.tokens,
        samples=one.samples + other.samples,
    )


def executions(lines: Iterable[Line]) -> dict[tuple[int, int], Line]:
    """(attempt, step) -> what its ranks did together."""
    found: dict[tuple[int, int], Line] = {}
    for line in lines:
        key = (line.attempt, line.step)
        found[key] = _merged(found[key], line) if key in found else line
    return found


def history(lines: Iterable[Line], *, restarts: bool) -> dict[int, Line]:
    """The steps whose effect is in the final state, by number.

    ``restarts``: of a step that was done again the last execution counts. Otherwise nothing is
    ever done again, and a step may be told of in two attempts, by ranks that differ.
    """
    found: dict[int, Line] = {}
    for line in sorted(executions(lines).values(), key=lambda line: line.at_s):
        known = found.get(line.step)
        found[line.step] = line if known is None or restarts else _merged(known, line)
    return dict(sorted(found.items()))


def new_steps(lines: Iterable[Line]) -> list[Line]:
    """The first execution of each step, in order of time: what is done again is no progress."""
    found: list[Line] = []
    for line in sorted(executions(lines).values(), key=lambda line: line.at_s):
        if not found or line.step > found[-1].step:
            found.append(line)
    return found


def step_time_s(steps: Sequence[Line]) -> float:
    """Median of the last steps, all of one attempt."""
    recent = [line for line in steps if line.attempt == steps[-1].attempt][-SETTLED_STEPS:]
    gaps = [b.at_s - a.at_s for a, b in pairwise(recent)]
    return statistics.median(gaps)


@dataclass(frozen=True, slots=True)
class Outage:
    """``ended_at_s``: the first new step of another attempt. ``paused_s``: without that step."""

    paused_s: float
    ended_at_s: float
    step_s: float
    steps_redone: int


def outage(lines: Sequence[Line], fault_at_s: float, *, announced: bool) -> Outage | None:
    """The first one after the fault; None while it lasts.

    Of an announced change (a drain, a join) training goes on for a while: it pauses from the last
    new step of the old attempt on, and the step that ends it is as long as the next ones are.
    """
    steps = new_steps(lines)
    before = [line for line in steps if line.at_s <= fault_at_s]
    if len(before) < 2:
        return None
    after = [line for line in steps if line.at_s > fault_at_s]
    first = next((line for line in after if line.attempt != before[-1].attempt), None)
    if first is None:
        return None
    still = [line for line in after if line.at_s < first.at_s]
    since_s = (still or before)[-1].at_s if announced else fault_at_s
    step_s = step_time_s(before)
    next_ones = [line for line in after if line.attempt == first.attempt]
    ending_s = step_time_s(next_ones) if announced and len(next_ones) > 2 else step_s
    paused_s = max(0.0, first.at_s - since_s - ending_s)
    return Outage(paused_s, first.at_s, step_s, redone(lines, fault_at_s, first.at_s))


def redone(lines: Iterable[Line], since_s: float, until_s: float) -> int:
    """Executions in that time of steps that had been done before."""
    done = executions(lines).values()
    count, newest = 0, 0
    for line in sorted(done, key=lambda line: line.at_s):
        if line.step <= newest and since_s < line.at_s <= until_s:
            count += 1
        newest = max(newest, line.step)
    return count


def sample_faults(
    history: Mapping[int, Line],
    first: int,
    last: int,
    expected: Callable[[int], Sequence[int]],
) -> tuple[int, int]:
    """(lost, repeated): samples of those steps that none consumed, and that several did."""
    wanted = [sample for step in range(first, last + 1) for sample in expected(step)]
    used = Counter(
        sample for step, line in history.items() if first <= step <= last for sample in line.samples
    )
    lost = sum(used[sample] == 0 for sample in wanted)
    return lost, sum(count - 1 for count in used.values())


def loss_difference(history: Mapping[int, Line], reference: Sequence[float]) -> float | None:
    """The largest one over the steps that both have; ``reference[0]`` is step 1's."""
    both = [step for step in history if step <= len(reference)]
    gaps = [abs(history[step].mean_loss - reference[step - 1]) for step in both]
    return max(gaps, default=None)


def goodput(lines: Iterable[Line], begin_s: float, end_s: float, step_s: float) -> float:
    """Share of the time that new steps would have taken undisturbed, at ``step_s`` each."""
    count = sum(begin_s < line.at_s <= end_s for line in new_steps(lines))
    return count * step_s / (end_s - begin_s)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, min and max; None of nothing."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }
