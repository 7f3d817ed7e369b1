"""From the command to the first step: `elastic-ft run` on local nodes, or on plain processes.

    python benchmarks/startup.py [--processes] [--times 5] [--beside ../older-checkout]

Four workers each time, FSDP2, a model of no size: what is left is the start. With ``--beside`` the
two trees take turns, and the ratio of each pair is printed: figures of one run alone drift.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

HERE = Path(__file__).parents[1]
DEADLINE_S = 300.0
JOB = {
    "name": "startup",
    "steps": 5,
    "model": {"preset": "decoder-1m", "kwargs": {"dim": 64, "n_layers": 2, "n_heads": 4}},
    "data": {"url": "stdlib:", "vocab_size": 512, "sequence_length": 64, "max_tokens": 300_000},
    "batch": {"global_batch_size": 8, "micro_batch_size": 1},
    "parallel": {"strategy": "fsdp"},
    "elastic": {"min_workers": 4, "max_workers": 4},
    "checkpoint": {"final": False},
}


def first_step_s(tree: Path, where: list[str]) -> float:
    """Seconds. Raises CalledProcessError, TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(yaml.safe_dump(JOB))
        command = [sys.executable, "-m", "elastic_ft", "run", "job.yaml", "--out", "run"]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        began_s = time.time()
        subprocess.run(
            [*command, *where],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=DEADLINE_S,
        )
        first = (Path(folder) / "run/steps.jsonl").read_text().splitlines()[0]
        return float(json.loads(first)["applied_at_s"]) - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--beside", type=Path)
    arguments = parser.parse_args()
    where = ["--processes"] if arguments.processes else ["--local-nodes", "4"]
    here, ratios = [], []
    for _ in range(arguments.times):
        line = ""
        if arguments.beside is not None:
            other = first_step_s(arguments.beside.resolve(), where)
            line = f"{other:5.1f} s before, "
        here.append(first_step_s(HERE, where))
        if line:
            ratios.append(here[-1] / other)
        print(f"{line}{here[-1]:5.1f} s" + (f": {ratios[-1]:.2f}" if line else ""), flush=True)
    for name, found in (("seconds", here), ("ratio", ratios)):
        if found:
            low, high = min(found), max(found)
            print(f"{name}: median {statistics.median(found):.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
