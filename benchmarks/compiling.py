"""Seconds of compiling and graphs: cold cache, warm cache, a new generation, and a joiner.

    python benchmarks/compiling.py --out benchmarks/results/compiling.json

Each kind of job runs twice with one cache of its own, which is empty at first. In each run a worker
is killed and replaced; the journal's ``compiled`` lines and the steps' times say the rest. Four
workers compile at once: on fewer cores a worker alone would take less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pause import Watched

WORLD = 4
PATIENCE_S = 900.0
SETTLED = 6  # steps of a generation, before the next change
BF16 = {"dtype": "bf16"}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "fsdp, tp 2": {"parallel": {"strategy": "fsdp", "tp": 2}},
    "fsdp, bf16": {"parallel": {"strategy": "fsdp"}, "precision": BF16},
    "fsdp, fp8": {"parallel": {"strategy": "fsdp"}, "precision": BF16 | {"fp8": "tensorwise"}},
}


def job_of(kind: str) -> dict[str, Any]:
    found = {
        "name": "compiling",
        "steps": 100_000,
        "model": {
            "preset": "decoder-1m",
            "kwargs": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
        },
        "data": {"url": "stdlib:", "vocab_size": 512, "sequence_length": 64, "max_tokens": 300_000},
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "elastic": {
            "min_workers": 2,
            "max_workers": WORLD,
            "gather_s": PATIENCE_S,
            "start_timeout_s": PATIENCE_S,
            "heartbeat_timeout_s": 30,
            "join_batch_s": 30,
        },
        "checkpoint": {"final": False},
    }
    found |= KINDS[kind]
    found["parallel"]["compile"] = True
    return found


def steps_of(run: Watched, generation: int) -> list[float]:
    return [s["step_time_s"] for s in run.steps() if s["generation"] == generation]


def generation_of(run: Watched, number: int) -> dict[str, Any]:
    """The ``number``-th that has formed, once it has made its steps."""
    run.until(f"generation {number}", lambda: len(run.events("generation_formed")) > number)
    formed = run.events("generation_formed")[number]
    generation = formed["generation"]
    run.until("steps", lambda: len(steps_of(run, generation)) > SETTLED)
    first, *others = steps_of(run, generation)
    graphs = [e["graphs"] for e in run.events("compiled") if e["generation"] == generation]
    return {
        "world": formed["world_size"],
        "graphs_in_steps": max(graphs, default=0),
        "first_step_s": round(first, 3),
        "step_s": round(statistics.median(others[:SETTLED]), 3),
    }


def measured(kind: str, scratch: Path, cache: Path) -> dict[str, Any]:
    """One run: a start, a loss, and the joiner."""
    job_file, folder = scratch / "job.yaml", scratch / "run"
    job_file.write_text(yaml.safe_dump(job_of(kind)))
    command = [sys.executable, "-m", "elastic_ft", "run", str(job_file), "--processes"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    child = subprocess.Popen(
        [*command, "--out", str(folder)], stdout=subprocess.DEVNULL, env=environment
    )
    try:
        run = Watched(folder, PATIENCE_S)
        whole = generation_of(run, 0)
        victim = run.events("generation_formed")[0]["members"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        shrunk = generation_of(run, 1)
        grown = generation_of(run, 2)
        early = {e["worker"]: e for e in run.events("compiled") if e["warmed"]}
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)
    first = {m["worker"] for m in run.events("generation_formed")[0]["members"]}
    at_start = [e for worker, e in early.items() if worker in first]
    joined = [e for worker, e in early.items() if worker not in first]
    return {
        "start_s": round(max(e["warmed_s"] for e in at_start), 2),
        "start_graphs": max(e["warmed"] for e in at_start),
        "joiner_s": round(max(e["warmed_s"] for e in joined), 2),
        "joiner_graphs": max(e["warmed"] for e in joined),
        "generations": [whole, shrunk, grown],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds whose name has this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for kind in KINDS:
        if arguments.only not in kind:
            continue
        with tempfile.TemporaryDirectory() as cache:
            for name in ("cold", "warm"):
                load = os.getloadavg()[0]
                with tempfile.TemporaryDirectory() as scratch:
                    found = measured(kind, Path(scratch), Path(cache))
                lines.append({"job": kind, "cache": name, "load_before": round(load, 1)} | found)
                print(json.dumps(lines[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
