"""Processor time of a loop of one's own, beside the same plain loop under torchrun.

    python benchmarks/own_loop.py --strategies ddp fsdp --lengths 64 256 --rounds 5

Two workers each; both systems are started in turns, and of each start the steps after the first
are taken, in windows. Longer samples make longer steps: what a step costs on top is the same.

What is counted is what the kernel says that a worker's process, all of its threads, has run: that
holds on a shared machine where wall clock does not. Printed are min, median and max of ms per step
and worker, and the median and min-max of the ratio (torchrun's to ours) over rounds, of medians: of
processor time, and of wall clock, which counts where nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from elastic_ft.observe.run_reader import read_lines

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks/own_loop_worker.py"
WORKERS, MICRO = 2, 4
DEADLINE_S = 300.0
SYSTEMS = ("torchrun", "elastic_ft")


def job(strategy: str) -> dict[str, Any]:
    return {
        "name": "own-loop",
        "loop": {},
        "steps": 1_000_000,
        "batch": {"global_batch_size": WORKERS * MICRO, "micro_batch_size": MICRO},
        "parallel": {"strategy": strategy},
        "elastic": {"min_workers": WORKERS, "max_workers": WORKERS},
    }


def command_of(system: str, strategy: str, folder: Path) -> list[str]:
    if system == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        return [sys.executable, *launcher, str(WORKER), str(folder), strategy]
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job(strategy)))
    launcher = ["-m", "elastic_ft", "launch", "--processes", "--foreground", "--job", str(path)]
    where = ["--workers", str(WORKERS), "--min-workers", str(WORKERS), "--out", str(folder / "run")]
    return [sys.executable, *launcher, *where, str(WORKER), str(folder)]


@contextlib.contextmanager
def running(
    command: list[str], folder: Path, length: int = 64
) -> Iterator[subprocess.Popen[bytes]]:
    """Its processes, however they were started, are ended with it."""
    quiet = {
        # How much memory glibc gives back, to fault it in again, is luck: up to 16 ms of a step of
        # either system. Neither gives any back.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
        "OWN_LOOP_LENGTH": str(length),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env=os.environ | quiet
        )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for left in [*family, psutil.Process(process.pid)] if process.poll() is None else family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait(30)


def measure(
    system: str, strategy: str, length: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Of one start: ms per step and worker, of each window, and of the training thread alone."""
    last = arguments.warm + arguments.windows * arguments.steps
    with tempfile.TemporaryDirectory(prefix="eft-own-loop-") as name:
        folder = Path(name)
        with running(command_of(system, strategy, folder), folder, length) as process:
            deadline_s = time.monotonic() + DEADLINE_S
            while not (told := _told(folder)) or min(len(lines) for lines in told) <= last:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError((folder / "output").read_text()[-3000:])
                time.sleep(0.5)
    return {
        "system": system,
        "strategy": strategy,
        "length": length,
        **{
            f"{what}_ms": [
                1e3 * (lines[at + arguments.steps][key] - lines[at][key]) / arguments.steps
                for lines in told
                for at in range(arguments.warm, last, arguments.steps)
            ]
            for what, key in (("cpu", "cpu_s"), ("thread", "thread_s"), ("wall", "at_s"))
        },
    }


def _told(folder: Path) -> list[list[dict[str, Any]]]:
    found = [read_lines(path) for path in folder.glob("*.jsonl")]
    return found if len(found) == WORKERS else []


def shown(found: list[dict[str, Any]], strategy: str, length: int) -> str:
    lines, name = [], f"{strategy}, {length} tokens,"
    found = [f for f in found if (f["strategy"], f["length"]) == (strategy, length)]
    for system in SYSTEMS:
        mine = [f for f in found if f["system"] == system]
        for what in ("cpu_ms", "thread_ms", "wall_ms"):
            values = [v for f in mine for v in f[what]]
            low, middle, high = min(values), statistics.median(values), max(values)
            lines.append(f"{name} {system} {what}: {middle:.2f} ({low:.2f}-{high:.2f})")
    for what in ("cpu_ms", "wall_ms"):
        of_system = [
            [statistics.median(f[what]) for f in found if f["system"] == system]
            for system in SYSTEMS
        ]
        ratios = [a / b for a, b in zip(*of_system, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        lines.append(f"{name} ratio of {what}: {middle:.3f} ({low:.3f}-{high:.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256], help="of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="of starts")
    parser.add_argument("--windows", type=int, default=3, help="in each")
    parser.add_argument("--steps", type=int, default=50, help="of a window")
    parser.add_argument("--warm", type=int, default=40, help="steps before the first")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    found = list[dict[str, Any]]()
    for number in range(arguments.rounds):
        for strategy, length in itertools.product(arguments.strategies, arguments.lengths):
            for system in SYSTEMS if number % 2 else SYSTEMS[::-1]:
                found.append(measure(system, strategy, length, arguments))
                load = os.getloadavg()[0]
                middle = statistics.median(found[-1]["cpu_ms"])
                print(
                    f"{strategy}, {length} tokens, {system}: {middle:.2f} ms, load {load:.1f}",
                    flush=True,
                )
    for strategy, length in itertools.product(arguments.strategies, arguments.lengths):
        print(f"\n{shown(found, strategy, length)}")
    out = Path(arguments.out) / "own_loop.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": vars(arguments), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
