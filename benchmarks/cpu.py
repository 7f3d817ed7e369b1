"""Where a step's processor time goes, by process: ``python benchmarks/cpu.py --systems torchrun``.

The training is that of ``benchmarks/peers``, undisturbed. Processor time holds on a shared machine
where wall clock does not: what is counted is what the kernel says that a process, and all of its
threads, has run, and how often they went to sleep (each time something wakes them), over windows
of some steps. Systems are started several times in turns. Printed are min, median and max over all
windows, in ms per step, of all processes of a kind together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import psutil

from benchmarks.document import table
from benchmarks.peers.bench import STEADY_POLL_S, WARM_STEPS, Bench
from benchmarks.peers.systems import SYSTEMS, System, make

DEADLINE_S = 300.0
SHOWN_MS = 0.005
# By what is in its name or its command line; the first that fits.
KINDS = {
    "ef-worker": "workers",
    "ef-keeper": "keepers",
    "ef-launcher": "launcher",
    "ef-warm": "launcher",
    "ef-template": "templates",
    "run_processes.py": "controller",
    "torch.distributed.run": "agents",
    "train_torchrun.py": "workers",
    "train_torchft.py": "workers",
    "ray::Keeper": "keepers",
    "ray::ElasticController": "controller",
    "ray::TrainController": "controller",
    "raylet/raylet": "Ray: raylets",
    "gcs_server": "Ray: gcs",
    "Agent": "Ray: agents",
    "agent": "Ray: agents",
    "-m elastic_ft": "driver",
    "train_ray.py": "driver",
}


@dataclass(frozen=True, slots=True)
class Used:
    """By a process so far."""

    cpu_s: float
    sleeps: int


def used_by(process: psutil.Process) -> Used | None:
    """None if it is gone."""
    try:
        times = process.cpu_times()
        sleeps = 0
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    sleeps += int(line.split()[1])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
    return Used(times.user + times.system, sleeps)


def kind_of(process: psutil.Process, workers: set[int]) -> str:
    if process.pid in workers:
        return "workers"
    try:
        text = f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return "others"
    return next((kind for part, kind in KINDS.items() if part in text), f"others: {text[:40]}")


class Watch:
    """Attributes:
    windows: of each, by kind, (ms of processor time, sleeps) per step.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self._kinds = bench, dict[int, str]()
        self.windows: list[dict[str, tuple[float, float]]] = []

    def window(self, steps: int) -> None:
        first, before = self._now()
        self._bench.until("steps enough", lambda: self._step() >= first + steps, STEADY_POLL_S)
        last, after = self._now()
        found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for pid in before.keys() & after.keys():
            cpu_ms = (after[pid].cpu_s - before[pid].cpu_s) * 1e3 / (last - first)
            sleeps = (after[pid].sleeps - before[pid].sleeps) / (last - first)
            so_far = found[self._kinds[pid]]
            found[self._kinds[pid]] = so_far[0] + cpu_ms, so_far[1] + sleeps
        found["all"] = sum(v[0] for v in found.values()), sum(v[1] for v in found.values())
        self.windows.append(dict(found))

    def _step(self) -> int:
        newest = self._bench.newest()
        return newest.step if newest else 0

    def _now(self) -> tuple[int, dict[int, Used]]:
        """The newest step, and what processes have used: at one moment, as far as can be."""
        self._bench.log.read()
        step, found = self._step(), dict[int, Used]()
        workers = set(self._bench.log.members().values())
        for process in psutil.Process().children(recursive=True):
            if (used := used_by(process)) is not None:
                found[process.pid] = used
                if process.pid not in self._kinds:
                    self._kinds[process.pid] = kind_of(process, workers)
        return step, found


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    with tempfile.TemporaryDirectory(prefix="eft-cpu-") as folder:
        system: System
        with make(name, Path(folder)) as system:
            bench = Bench(system, DEADLINE_S)
            bench.whole()
            watch = Watch(bench)
            watch.window(WARM_STEPS)
            watch.windows.clear()
            for _ in range(arguments.windows):
                watch.window(arguments.steps)
    return watch.windows


def shown(system: str, windows: list[dict[str, tuple[float, float]]]) -> str:
    kinds = {kind for window in windows for kind in window}
    rows = []
    for kind in sorted(
        kinds, key=lambda k: -statistics.median(w.get(k, (0, 0))[0] for w in windows)
    ):
        cpu = [window.get(kind, (0.0, 0.0))[0] for window in windows]
        sleeps = [window.get(kind, (0.0, 0.0))[1] for window in windows]
        if max(cpu) >= 0.005:
            rows.append([kind, *_row(cpu, ".2f"), *_row(sleeps, ".1f")])
    titles = [system, "CPU ms min", "median", "max", "sleeps min", "median", "max"]
    return table(titles, rows)


def _row(values: Sequence[float], form: str) -> list[str]:
    found = (min(values), statistics.median(values), max(values))
    return [format(value, form) for value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ours = ["elastic_ft (processes)", "elastic_ft (Ray)", "torchrun"]
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=ours)
    parser.add_argument("--rounds", type=int, default=3, help="of starts")
    parser.add_argument("--windows", type=int, default=3, help="in each")
    parser.add_argument("--steps", type=int, default=200, help="of a window")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    found: dict[str, list[Any]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name in arguments.systems:
            began_s = time.monotonic()
            found[name] += measure(name, arguments)
            print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    for name, windows in found.items():
        print(f"\n{shown(name, windows)}")
    out = Path(arguments.out) / "cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": vars(arguments), "windows": found}, indent=1))


if __name__ == "__main__":
    main()
