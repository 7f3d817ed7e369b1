"""The first half hour on one GPU: each step bounded, one line of JSON each, worst case 30 minutes.

    make gpu                                        # or without make; no Ray, nothing downloaded:
    PYTHONPATH=. python benchmarks/gpu/run.py       # --device cpu: a dry run of what can be one

Lines say whether the step has passed, what was expected and what was found; they and all logs are
kept in ``--out``. A step that fails ends nothing: the next one is tried. Exits with 1 if one has
not passed, or was not reached. Nothing here changes the GPU's settings. Beside torch it takes a few
packages: the first step says which are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MINUTES = 30
LEAST_S = 10  # of a step
DRY = 3  # times as long may a step take on two cores
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "OMP_NUM_THREADS": "2",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    limit_s: int
    command: str  # of a script here
    expected: str
    on_cpu: bool = False  # in a dry run, too


MEMORY = "job.py --workers 3 --preset decoder-160m --kill --memory"
STEPS = (
    Step("probe", 80, "probe.py", "workers' CUDA is clean after the fork server's preload"),
    Step("nccl_killed", 70, "nccl.py killed --world 4", "woken < 1 s, again < 5 s, right", True),
    Step("nccl_running", 70, "nccl.py running --world 4 --hsdp", "woken < 1 s, both times", True),
    Step("nccl_generations", 60, "nccl.py generations --world 2", "memory and fds flat", True),
    Step("nccl_init", 50, "nccl.py init --world 5", "woken < 1 s, both times; again right", True),
    Step("train_fsdp_1", 70, "job.py --workers 1", "completed: FSDP2 in a world of one", True),
    Step("kill_gloo", 90, "job.py --workers 4 --backend gloo --kill", "3 of 4 pids kept", True),
    Step("kill_fsdp", 90, "job.py --workers 4 --kill", "3 of 4 pids kept, pause < 1 s", True),
    Step("kill_hsdp", 90, "job.py --workers 4 --strategy hsdp --kill", "as kill_fsdp"),
    Step("kill_tp", 90, "job.py --workers 4 --tp 2 --kill", "completed; pids kept"),
    Step("kill_experts", 90, "job.py --workers 3 --technique experts --kill", "as kill_tp", True),
    Step("cp", 60, "job.py --workers 2 --technique cp", "losses of train_fsdp_1 to 1 %", True),
    Step("compile", 100, "job.py --workers 2 --technique compile", "as cp", True),
    Step("offload", 60, "job.py --workers 2 --technique offload", "completed", True),
    Step("fp8", 60, "job.py --workers 2 --technique fp8", "losses of cp to 2 %", True),
    Step("sick_assert", 80, "job.py --workers 3 --fault gpu_assert", "device_lost, completed"),
    Step("sick_oom", 80, "job.py --workers 3 --fault gpu_oom", "once more, then completed"),
    Step("sick_hang", 90, "job.py --workers 3 --fault gpu_hang", "its worker is hung, completed"),
    Step("waits", 50, "waits.py", "one in a step of each kind", True),
    Step("speed_bare", 75, "speed.py bare", "25-35 % MFU of bf16 on an H100 or H200", True),
    Step("speed_ours", 75, "speed.py ours", "at least 0.97 of bare", True),
    Step("snapshot", 120, "../gpu_snapshot.py --preset decoder-410m --rounds 4", "stall < 1 %"),
    Step("memory", 100, MEMORY, "peak < 2 x steady"),
)


def run(step: Step, device: str, out: Path, limit_s: float) -> dict[str, Any]:
    """What the step printed as JSON. It is killed with all its processes at the limit."""
    arguments = step.command.split()
    command = [sys.executable, str(HERE / arguments[0]), *arguments[1:]]
    if not arguments[0].startswith(".."):
        command += ["--device", device]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    log, began = out / f"{step.name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").splitlines()
    found = told(lines)
    return {
        "step": step.name,
        "passed": code == 0 and bool(found),
        "ended": code,
        "seconds": round(time.monotonic() - began, 1),
        "expected": step.expected,
        "found": found or lines[-3:],
    }


def told(lines: list[str]) -> list[Any]:
    """Those that are whole JSON: one that is killed may leave a part."""
    found = []
    for line in lines:
        if line.startswith('{"'):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="*", help="names of steps")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * arguments.minutes
    failed = []
    with (arguments.out / f"{arguments.device}.jsonl").open("a") as record:
        for step in STEPS:
            left_s = until_s - time.monotonic()
            if arguments.only and step.name not in arguments.only:
                continue
            if arguments.device == "cpu" and not step.on_cpu:
                continue
            if left_s < LEAST_S:
                line: dict[str, Any] = {"step": step.name, "passed": False, "ended": "not reached"}
            else:
                limit_s = step.limit_s * (DRY if arguments.device == "cpu" else 1)
                line = run(step, arguments.device, arguments.out, min(limit_s, left_s))
            failed += [] if line["passed"] else [step.name]
            text = json.dumps(line, default=str)
            print(text, flush=True)
            record.write(text + "\n")
            record.flush()
    print(f"not passed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
