"""How long training pauses: from a real signal to the next committed step, above one step's time.

    python benchmarks/pause.py --strategy fsdp --kill worker --processes
    python benchmarks/pause.py --strategy ddp --kill raylet

Runs one job through the command line, kills from outside by the pids in the journal, ten times,
letting the world become whole in between, and reads the figures from the run folder alone. Joins
are measured on the way: from the step boundary at which survivors stop to the next step's start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from elastic_ft.observe.run_folder import read_lines

DEADLINE_S = 180.0


def make_job(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "pause",
        "steps": 100_000,
        "model": {
            "preset": "decoder-1m",
            "kwargs": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176},
        },
        "data": {"url": "stdlib:", "vocab_size": 512, "sequence_length": 64, "max_tokens": 300_000},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "parallel": {"strategy": arguments.strategy},
        "elastic": {"min_workers": 2, "max_workers": 4, "gather_s": 60},
        "checkpoint": {"final": False},
    }


class Watched:
    """The run folder of a job that somebody else runs."""

    def __init__(self, folder: Path, patience_s: float = DEADLINE_S) -> None:
        self.folder, self._patience_s = folder, patience_s

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = read_lines(self.folder / "events.jsonl")
        return [line for line in lines if line["event"] == name]

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "steps.jsonl")

    def until(self, what: str, condition: Any) -> Any:
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.05)
        raise TimeoutError(f"waited {self._patience_s:g} s for {what}")

    def whole(self, world: int) -> dict[str, Any] | None:
        formed = self.events("generation_formed")
        return formed[-1] if formed and formed[-1]["world_size"] == world else None


def one_fault(run: Watched, kill: str) -> float:
    """Kills one member. Returns seconds from the signal to the next committed step, less a step."""
    formed = run.until("a whole world", lambda: run.whole(4))
    settled = formed["step"] + 8
    run.until("steps in it", lambda: (s := run.steps()) and s[-1]["step"] >= settled)
    victim = formed["members"][-1]
    step_s = statistics.median(line["step_time_s"] for line in run.steps()[-6:])
    killed_at = time.time()
    os.kill(victim["raylet_pid" if kill == "raylet" else "pid"], signal.SIGKILL)

    def next_step() -> float | None:
        formed_later = [e for e in run.events("generation_formed") if e["at_s"] > killed_at]
        if not formed_later:
            return None
        generation = formed_later[0]["generation"]
        after = [s for s in run.steps() if s["generation"] >= generation]
        return after[0]["committed_at_s"] if after else None

    committed_at = run.until("the next committed step", next_step)
    return committed_at - killed_at - step_s


@contextlib.contextmanager
def cluster(arguments: argparse.Namespace) -> Iterator[tuple[list[str], Callable[[], object]]]:
    """Yields where to run (command line options), and what brings a lost node back."""
    if arguments.processes:
        yield ["--processes"], lambda: None
        return
    from elastic_ft.hosts.ray.cluster import LocalCluster

    with LocalCluster(4, 1) as local:
        yield ["--address", local.address], local.add_node


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[list[float], list[float]]:
    """Returns (pauses after a kill, survivors' pauses at joins), seconds."""
    job_file, folder = scratch / "job.yaml", scratch / "run"
    job_file.write_text(yaml.safe_dump(make_job(arguments)))
    with cluster(arguments) as (where, add_node):
        command = [sys.executable, "-m", "elastic_ft", "run", str(job_file), *where]
        child = subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.DEVNULL)
        try:
            run, pauses = Watched(folder), []
            for _ in range(arguments.times):
                pauses.append(one_fault(run, arguments.kill))
                if arguments.kill == "raylet":
                    add_node()
            run.until("the last join", lambda: run.whole(4))
            recovered = run.events("recovered")
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
    return pauses, [e["paused_s"] for e in recovered if e["cause"] == "worker_joined"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp", "hsdp"])
    parser.add_argument("--kill", default="worker", choices=["worker", "raylet"])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--processes", action="store_true", help="plain processes, no Ray")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pauses, joins = measure(arguments, Path(scratch))
    host = "processes" if arguments.processes else "ray"
    title = f"{arguments.strategy}, {arguments.kill} killed, {host}"
    show(f"{title}: pause above one step", pauses)
    show(f"{title}: survivors' pause at a join, including the boundary", joins)
    out = Path(arguments.out) / f"pause-{arguments.strategy}-{arguments.kill}-{host}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": vars(arguments), "pause_s": pauses, "join_s": joins}))


def show(title: str, values: list[float]) -> None:
    if values:
        print(
            f"{title}: median {statistics.median(values):.3f} s "
            f"(min {min(values):.3f}, max {max(values):.3f}, n {len(values)})"
        )


if __name__ == "__main__":
    main()
