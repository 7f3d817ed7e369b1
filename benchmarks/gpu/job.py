"""A job of several workers on this GPU, disturbed: one is killed, or its GPU is made to fail."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from elastic_ft.config import parse_job
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import run_local
from elastic_ft.observe.run_folder import read_lines

STEPS, AT_STEP = 40, 10
BF16 = {"precision": {"dtype": "bf16"}}
# What each has that kernels or streams of a GPU can get wrong alone.
TECHNIQUES: dict[str, dict[str, Any]] = {
    "": {},
    "experts": {"model": {"preset": "decoder-moe-4m"}, "parallel": {"ep": 2}} | BF16,
    "cp": {"parallel": {"cp": 2}} | BF16,
    "compile": {"parallel": {"compile": True}} | BF16,
    "offload": {"optimizer": {"offload": "cpu"}},
    "fp8": {"precision": {"dtype": "bf16", "fp8": "rowwise"}},
}
# What the journal must have of each fault.
FAULTS = {
    "gpu_assert": "device_lost",
    "gpu_oom": "collective_failed",
    "gpu_hang": "worker_hung",
}
LOOK_S, GROWTH_MAX = 0.02, 2.0
ODD = ("worker_lost", "device_lost", "worker_raised", "collective_failed", "worker_hung")


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    parallel: dict[str, Any] = {"strategy": options.strategy, "device": options.device}
    parallel |= {"backend": options.backend if options.device == "cuda" else "auto"}
    parallel |= {"shard_size": 2} if options.strategy == "hsdp" else {}
    parallel |= {"tp": options.tp} if options.tp > 1 else {}
    with_it = TECHNIQUES[options.technique]
    parallel |= with_it.get("parallel", {})
    offloads = options.technique == "offload" and options.device == "cuda"  # of 1 MB and more
    parallel |= {"offload_activations": True} if offloads else {}
    preset = with_it.get("model", {}).get("preset", options.preset)
    preset = "decoder-15m" if offloads else preset
    others = {key: with_it[key] for key in with_it.keys() - {"parallel", "model"}}
    return {
        "name": "gpu",
        "seed": 3,
        "steps": STEPS,
        "model": {"preset": preset},
        "data": {
            "url": "stdlib:",
            "vocab_size": 1024,
            "sequence_length": 1024 if offloads else 128,
            "max_tokens": 200_000,
        },
        "batch": {"global_batch_size": 12, "micro_batch_size": 1},
        "parallel": parallel,
        "snapshot": {"every_steps": 1},
        "checkpoint": {"every_s": None, "final": False},
        "elastic": {
            "min_workers": 1,
            "max_workers": options.workers,
            "gather_s": 60,
            "pause_timeout_s": 30,
            "hang_timeout_s": 20,
            "start_timeout_s": 120,
        },
    } | others


class Memory(threading.Thread):
    """What all processes have of the GPU's memory, in MiB above what others had before.

    Attributes:
        steady: when training was about to be disturbed.
        peak: since then.
    """

    def __init__(self) -> None:
        super().__init__(name="memory", daemon=True)
        import pynvml  # no CUDA in this process: it would take of what is looked at

        pynvml.nvmlInit()
        self._gpu, self._nvml = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml
        self._before, self.steady, self.peak = self._used(), 0, 0
        self.over = threading.Event()

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used) >> 20

    def run(self) -> None:
        while not self.over.wait(LOOK_S):
            self.peak = max(self.peak, self._used() - self._before)

    def begin(self) -> None:
        self.steady = self.peak = self._used() - self._before


def why_failed(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """What was not as it must be, or ""."""
    others = options.workers - 1
    if found["status"] != "completed":
        return f"the job has ended as {found['status']}"
    if found["steps"] != STEPS:
        return f"{found['steps']} of {STEPS} steps"
    if options.kill and found["pause_s"] is None:
        return "nobody was killed"
    if options.kill and found["pids_kept"] != others:
        return f"{found['pids_kept']} of {others} processes were kept"
    if options.fault and not found["odd"]:
        return f"{options.fault} did nothing"
    if options.fault and FAULTS[options.fault] not in found["events"]:
        return f"{options.fault} is no {FAULTS[options.fault]} in the journal"
    if "peak_mib" in found and found["peak_mib"] > GROWTH_MAX * found["steady_mib"]:
        return f"{found['peak_mib']} MiB at the change of layout, {found['steady_mib']} before"
    return ""


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--preset", default="decoder-1m")
    parser.add_argument("--technique", choices=TECHNIQUES, default="")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--memory", action="store_true", help="looked at, and must not double")
    return parser.parse_args()


def told_of(folder: Path, found: dict[str, Any], killed_at_s: float, kept: int) -> dict[str, Any]:
    """What the run folder says. ``killed_at_s``: 0: nobody was. ``kept``: processes."""
    steps, events = read_lines(folder / "steps.jsonl"), read_lines(folder / "events.jsonl")
    after = [s["applied_at_s"] for s in steps if s["applied_at_s"] > killed_at_s > 0]
    times = [step["step_time_s"] for step in steps]
    return {
        "status": found["status"],
        "reason": str(found.get("reason"))[:300],
        "steps": len(steps),
        "losses": [round(steps[at]["loss"], 4) for at in (0, -1)] if steps else None,
        "pids_kept": kept,
        "pause_s": round(after[0] - killed_at_s, 3) if after else None,
        "step_s": round(statistics.median(times), 4) if times else None,
        "worlds": sorted({step["world_size"] for step in steps}),
        "odd": [
            [line["event"], str(line.get("reason"))[:120]]
            for line in events
            if line["event"] in ODD
        ][:6],
        "events": sorted({line["event"] for line in events if line["event"] in ODD}),
    }


def main() -> int:
    options = asked()
    faults = [PointFault("forward", options.fault, rank=1, step=AT_STEP)] if options.fault else []
    pids: dict[str, int] = {}
    last: dict[str, int] = {}
    killed_at_s = 0.0
    memory = Memory() if options.memory else None
    if memory is not None:
        memory.start()

    def on_step(host: Any, line: dict[str, Any]) -> None:
        nonlocal killed_at_s
        now = {worker: host.pid_of(worker) for worker in host.alive()}
        if not pids and line["step"] == AT_STEP - 1:
            pids.update(now)
            if memory is not None:
                memory.begin()
            if options.kill:
                killed_at_s = time.time()
                os.kill(now[max(now)], signal.SIGKILL)
        last.clear()
        last.update(now)

    folder = Path(tempfile.mkdtemp(prefix="gpu-kit-"))
    nodes = {f"n{number}": 1 for number in range(options.workers)}
    values = job_of(options)
    try:
        found = run_local(
            parse_job(values), str(folder), nodes=nodes, faults=faults, on_step=on_step
        )
    except Exception as error:
        found = {"status": type(error).__name__, "reason": str(error)[:300]}
    if memory is not None:
        memory.over.set()
    kept = sum(last.get(worker) == pid for worker, pid in pids.items())
    line = {
        "job": values["parallel"],
        "technique": options.technique,
        "workers": options.workers,
        **told_of(folder, found, killed_at_s, kept),
    }
    if memory is not None:
        line |= {"steady_mib": memory.steady, "peak_mib": memory.peak}
    why = why_failed(options, line)
    print(json.dumps({"failed": why} | line if why else line))
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
