"""A recorded spot-instance trace, made small: who comes and goes when.

From ``bamboo-aws-p3.csv`` (uclasystem/bamboo, MIT licence, copyright (c) 2022 UCLASystem). A slice
for every system: the number of nodes over three hours, scaled from its largest to ``WORKERS`` and
rounded, the hours to seconds; ``python benchmarks/peers/replay.py TRACE`` prints what stands here.
And the whole trace in minutes, as ``elastic-ft chaos trace`` has it.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.settings import WORKERS, WORKERS_MIN
from chaos.trace import TraceChange, compressed, load_trace

LENGTH_S = 45.0
WHOLE, WHOLE_S = "bamboo-aws-p3", 300.0
BEGIN_H, HOURS = 2.0, 3.0


CHANGES: tuple[TraceChange, ...] = (
    TraceChange(5.3, 3),
    TraceChange(8.2, 4),
    TraceChange(14.5, 3),
    TraceChange(19.8, 4),
    TraceChange(29.0, 3),
    TraceChange(37.2, 2),
    TraceChange(39.2, 3),
    TraceChange(39.5, 4),
    TraceChange(40.8, 3),
    TraceChange(43.5, 4),
)


def whole_trace() -> tuple[TraceChange, ...]:
    """From its highest point on, where the nodes are all there."""
    return compressed(load_trace(WHOLE, WORKERS, 0), WHOLE_S)[1:]


def described() -> dict[str, Any]:
    slice_ = {"length_s": LENGTH_S, "changes": [asdict(change) for change in CHANGES]}
    whole = {"length_s": WHOLE_S, "changes": [asdict(change) for change in whole_trace()]}
    return slice_ | {"whole": whole}


def changes_of(
    rows: list[tuple[float, int]], begin_h: float, hours: float, nodes: int, at_least: int
) -> list[TraceChange]:
    """``rows``: (hour, +1 or -1), in order. Scaled to ``nodes`` at the slice's largest."""
    count, curve = 0, []
    for hour, change in rows:
        count += change
        curve.append((hour, count))
    inside = [(hour, count) for hour, count in curve if begin_h <= hour < begin_h + hours]
    largest = max(count for _, count in inside)
    found: list[TraceChange] = []
    now = nodes
    for hour, count in inside:
        scaled = max(at_least, round(nodes * count / largest))
        at_s = round((hour - begin_h) / hours * LENGTH_S, 1)
        if scaled != now:
            if found and found[-1].at_s == at_s:
                found.pop()
            found.append(TraceChange(at_s, scaled))
            now = scaled
    return found


def main() -> None:
    with Path(sys.argv[1]).open(newline="") as file:
        rows = [(int(ms) / 3.6e6, 1 if what == "add" else -1) for ms, what, _ in csv.reader(file)]
    for change in changes_of(rows, BEGIN_H, HOURS, WORKERS, WORKERS_MIN):
        print(f"    TraceChange({change.at_s}, {change.nodes}),")


if __name__ == "__main__":
    main()
