"""Steady steps, program beside program: ``python benchmarks/peers/turns.py --seconds 150``.

On a machine whose speed drifts by a tenth within a minute, two runs one after the other say little
about a percent. Here all programs run at once, and all but one are stopped (SIGSTOP, to the last
process of each): every so many seconds it is another one's turn. A *pair* is a turn of the first
system and another one's after it: the drift between the two is that of a few seconds. All that are
stopped together must stay so for less than what they take for a hang (``settings.HANG_S``).

Systems are those of ``benchmarks.peers.systems``; ``NAME@FOLDER`` is that of another checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from benchmarks.peers import systems
from benchmarks.peers.bench import Bench
from benchmarks.peers.settings import HANG_S
from benchmarks.peers.systems import SYSTEMS, System, make

ROOT = Path(__file__).parents[2]
FIRST_STEP = 60  # by then all is set up
RESUME_S = 0.25  # after which a turn is measured: collectives that were under way are over
TOGETHER = ["torchrun", "elastic_ft (processes)", "elastic_ft (Ray)", "Ray Train"]


@dataclass(frozen=True, slots=True)
class Turn:
    """``step_s``: of its steps, the mean; ``cpu_s``: processor time of a step, all processes."""

    step_s: float
    cpu_s: float


@dataclass(slots=True)
class Contestant:
    """``known``: its processes as it was set up; they start others all the time."""

    name: str
    system: System
    bench: Bench
    known: list[psutil.Process]
    spans: list[tuple[float, float, float]] = field(default_factory=list)  # from, until, cpu_s

    def processes(self) -> list[psutil.Process]:
        found = {process.pid: process for process in self.known}
        for process in self.known:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {child.pid: child for child in process.children(recursive=True)}
        return [*found.values()]

    def signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def cpu_s(self) -> float:
        """Processor time of all its threads so far. To the nanosecond, unlike ``cpu_times``."""
        total_ns = 0
        for process in self.processes():
            for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # it has ended
                    total_ns += int(task.read_text().split()[0])
        return total_ns / 1e9

    def take_turn(self, seconds: float) -> None:
        self.signal(signal.SIGCONT)
        time.sleep(RESUME_S)
        began_s, cpu_s = time.time(), self.cpu_s()
        time.sleep(seconds)
        self.spans.append((began_s, time.time(), self.cpu_s() - cpu_s))
        self.signal(signal.SIGSTOP)

    def turns(self) -> list[Turn | None]:
        """None: too few steps were seen to end in it."""
        self.signal(signal.SIGCONT)
        time.sleep(2 * RESUME_S)
        self.bench.until("what is written", lambda: self._applied()[-1:] > [self.spans[-1][1]])
        self.signal(signal.SIGSTOP)
        applied = self._applied()
        return [turn_of(applied, *span) for span in self.spans]

    def _applied(self) -> list[float]:
        found: dict[int, float] = {}
        for line in self.bench.log.lines:
            found[line.step] = min(line.at_s, found.get(line.step, line.at_s))
        return sorted(found.values())


def turn_of(applied: Iterable[float], began_s: float, ended_s: float, cpu_s: float) -> Turn | None:
    """``applied``: when each step was, in order."""
    inside = [at_s for at_s in applied if began_s <= at_s <= ended_s]
    if len(inside) < 4:
        return None
    step_s = (inside[-1] - inside[0]) / (len(inside) - 1)
    return Turn(step_s, cpu_s * step_s / (ended_s - began_s))


def compared(first: Sequence[Turn | None], other: Sequence[Turn | None]) -> dict[str, Any]:
    """``rate``: of the first one's; ``cpu``: processor time of a step, of the first one's. Medians
    over pairs; ``rate_of_all``: of all pairs' steps together."""
    pairs = [(a, b) for a, b in zip(first, other, strict=True) if a and b]
    rates, cpus = [a.step_s / b.step_s for a, b in pairs], [b.cpu_s / a.cpu_s for a, b in pairs]
    return {
        "pairs": len(pairs),
        "step_ms": round(statistics.median(b.step_s for _, b in pairs) * 1e3, 2),
        "rate": round(statistics.median(rates), 3),
        "rate_quartiles": [round(q, 3) for q in statistics.quantiles(rates, n=4)[::2]],
        "rate_of_all": round(sum(a.step_s for a, _ in pairs) / sum(b.step_s for _, b in pairs), 3),
        "cpu": round(statistics.median(cpus), 3),
    }


def start(stack: contextlib.ExitStack, name: str, deadline_s: float) -> Contestant:
    kind, _, tree = name.partition("@")
    systems.ROOT = Path(tree).resolve() if tree else ROOT
    systems.HERE, os.environ["PYTHONPATH"] = systems.ROOT / "benchmarks/peers", str(systems.ROOT)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    system = stack.enter_context(make(kind, Path(folder)))
    bench = Bench(system, deadline_s)
    bench.whole()
    bench.until("it is set up", lambda: (line := bench.newest()) and line.step >= FIRST_STEP, 0.2)
    children = psutil.Process().children(recursive=True)
    found = Contestant(name, system, bench, [p for p in children if p.pid not in before])
    stack.callback(found.signal, signal.SIGCONT)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("systems", nargs="*", default=TOGETHER, metavar="NAME[@FOLDER]")
    parser.add_argument("--seconds", type=float, default=150.0, help="in which turns are taken")
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of a turn")
    parser.add_argument("--deadline", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="append the figures, as a line of JSON")
    args = parser.parse_args()
    if unknown := {name.partition("@")[0] for name in args.systems} - {*SYSTEMS}:
        parser.error(f"no such systems: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if len(args.systems) * (args.turn + RESUME_S) > HANG_S - 1:
        parser.error(f"all others' turns have to take less than {HANG_S:g} s: a shorter --turn")
    with contextlib.ExitStack() as stack:
        running = [start(stack, name, args.deadline) for name in args.systems]
        for one in running:  # not before: who is stopped for too long has failed
            one.signal(signal.SIGSTOP)
        until_s = time.monotonic() + args.seconds
        while time.monotonic() < until_s:
            for one in running:
                one.take_turn(args.turn)
        turns = {one.name: one.turns() for one in running}
        first = turns[args.systems[0]]
        found = {name: compared(first, each) for name, each in turns.items()}
    load = round(os.getloadavg()[0], 2)
    for name, figures in found.items():
        print(f"{name}: {json.dumps(figures)}", flush=True)
    if args.out:
        with args.out.open("a") as file:
            line = {"beside": args.systems[0], "load": load, "systems": found}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
