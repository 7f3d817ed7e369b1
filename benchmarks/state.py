"""What keeping the state safe costs, in paired measurements, each a command of its own.

    python benchmarks/state.py reshard    # 4 -> 3 of 1 GB, beside raw Gloo send and receive
    python benchmarks/state.py stall      # a checkpoint, beside torch.distributed.checkpoint's
    python benchmarks/state.py steps      # snapshots each step, and as advised, beside none
    python benchmarks/state.py restart    # the only worker is killed: from the keeper, in seconds
    python benchmarks/state.py memory     # host memory per byte of state

``benchmarks/store.py`` has the object store beside a bare client. Printed are medians (min-max);
raw numbers, the command and the machine's load go to ``--out``/state-<command>.json.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import reshard
import stall
from overhead import Elastic, make_job, step_seconds, warm_up

from elastic_ft.config import Job, SnapshotConfig
from elastic_ft.observe.run_folder import read_lines

DEADLINE_S = 180.0
NEVER = 1_000_000  # steps
SETTLE_STEPS = 10
SEGMENT = "elastic_ft-snapshot"  # the keeper's memory, as the kernel names it

Lines = list[dict[str, Any]]


def show(what: str, values: Iterable[float], unit: str = "") -> None:
    found = sorted(values)
    print(f"{what}: {statistics.median(found):.4g}{unit} ({found[0]:.4g}-{found[-1]:.4g})")


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.02)
    return found


# ---------------------------------------------------------------------------- below the job


def run_reshard(arguments: argparse.Namespace) -> Lines:
    lines: Lines = [dict(line) for line in reshard.measure(arguments.mib, arguments.rounds)]
    show("re-shard, of raw Gloo's rate", (line["ratio"] for line in lines))
    show("re-shard", (line["move_s"] for line in lines), " s")
    show("raw Gloo", (line["raw_s"] for line in lines), " s")
    ratios = (line["raw_cpu_s"] / line["move_cpu_s"] for line in lines)
    show("the same by processor time of all ranks", ratios)
    return lines


def run_stall(arguments: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory() as folder:
        lines = stall.measure(arguments.preset, arguments.rounds, Path(folder))
    for measure in ("blocked_s", "cpu_s", "all_s"):
        for way in stall.WAYS:
            show(f"{measure} {way}", (line[way][measure] for line in lines), " s")
    for measure in ("blocked_s", "cpu_s"):
        for line in lines:
            others = min(line[way][measure] for way in ("async_save", "save"))
            line[f"ratio_{measure}"] = others / line["ours"][measure]
        show(f"{measure}: the better of them, of ours", (x[f"ratio_{measure}"] for x in lines))
    return lines


# --------------------------------------------------------------------------------- the job


def job_of(arguments: argparse.Namespace, workers: int, every: int | str = "auto") -> Job:
    values = {"preset": arguments.preset, "batch": arguments.batch, "strategy": "fsdp"}
    job = make_job(argparse.Namespace(**values, workers=workers))
    return job.model_copy(update={"snapshot": SnapshotConfig(every_steps=every)})  # type: ignore[arg-type]


def started(job: Job, folder: str, name: str, stack: contextlib.ExitStack) -> Elastic:
    path = Path(folder) / name
    path.mkdir()
    elastic = Elastic(job, path)
    stack.callback(elastic.close)
    stack.callback(elastic.signal, signal.SIGCONT)
    return elastic


def run_steps(arguments: argparse.Namespace) -> Lines:
    """Jobs side by side that take turns, as in overhead.py."""
    lines: Lines = []
    kinds: dict[str, int | str] = {"none": NEVER, "each": 1, "auto": "auto"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        jobs: dict[str, Elastic] = {}
        for name, every in kinds.items():
            jobs[name] = started(job_of(arguments, 2, every), folder, name, stack)
            warm_up(jobs[name])
        for number in range(arguments.rounds):
            turns = [*jobs.items()][number % 3 :] + [*jobs.items()][: number % 3]
            line = {name: step_seconds(job, arguments.seconds) for name, job in turns}
            lines.append({"step_s": line} | {k: line[k] / line["none"] for k in ("each", "auto")})
        for note in jobs["auto"].notes("snapshot_interval"):
            print(note)
    show("a step without snapshots", (line["step_s"]["none"] for line in lines), " s")
    for name in ("each", "auto"):
        show(f"a step with snapshots, {name}, of one without", (line[name] for line in lines))
    return lines


def run_restart(arguments: argparse.Namespace) -> Lines:
    lines: Lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        elastic = started(job_of(arguments, 1, 1), folder, "run", stack)
        steps = elastic.folder / "steps.jsonl"
        for _ in range(arguments.rounds):
            until("steps", lambda: _in_newest_generation(steps) >= SETTLE_STEPS)
            lines.append(_one_restart(elastic))
        elastic.close()
        state = [e["state_bytes"] for e in _events(elastic, "host_memory")]
    for line in lines:
        line["state_bytes"] = state[0] if state else None
    show("from SIGKILL to the next committed step", (line["total_s"] for line in lines), " s")
    show("of that until a new process is ready", (line["start_s"] for line in lines), " s")
    show("of that forming and restoring", (line["restore_s"] for line in lines), " s")
    print(f"sources: {', '.join(sorted({line['source'] for line in lines}))}")
    return lines


def _in_newest_generation(steps: Path) -> int:
    lines = read_lines(steps) if steps.exists() else []
    return sum(line["generation"] == lines[-1]["generation"] for line in lines)


def _events(elastic: Elastic, event: str) -> Lines:
    return [e for e in read_lines(elastic.folder / "events.jsonl") if e["event"] == event]


def _one_restart(elastic: Elastic) -> dict[str, Any]:
    """Kills the worker. Seconds until the next committed step, and of that the parts."""
    steps = elastic.folder / "steps.jsonl"
    generation = read_lines(steps)[-1]["generation"]
    victim = elastic._host.alive()[0]
    pid = elastic._host.pid_of(victim)
    assert pid is not None
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)

    def next_step() -> float | None:
        found = [s for s in read_lines(steps) if s["generation"] > generation]
        return found[0]["committed_at_s"] if found else None

    committed_at = until("the next committed step", next_step)
    inbox = read_lines(elastic.folder / "inbox.jsonl")
    later = {e["type"]: e["at_s"] for e in reversed(inbox) if e["at_s"] > killed_at}
    recovered = _events(elastic, "recovered")
    return {
        "total_s": committed_at - killed_at,
        "start_s": later["WorkerReady"] - killed_at,
        "restore_s": later["Resumed"] - later["WorkerReady"],
        "source": recovered[-1]["source"],
        "steps_lost": recovered[-1]["steps_lost"],
    }


def run_memory(arguments: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        elastic = started(job_of(arguments, arguments.workers, 1), folder, "run", stack)
        until("steps", lambda: len(elastic.times()) >= SETTLE_STEPS)
        host = elastic._host
        keepers = [node.keeper.pid for node in host._nodes.values() if node.keeper]
        workers = [host.pid_of(worker) for worker in host.alive()]
        held = sum(_segment_bytes(pid) for pid in (*workers, *keepers) if pid)
        own = [psutil.Process(pid).memory_full_info().uss for pid in keepers]
        elastic.close()
        told = _events(elastic, "host_memory")
    state = sum(event["state_bytes"] for event in told)
    line = {
        "workers": arguments.workers,
        "state_bytes": state,
        "snapshot_pss_bytes": held,
        "allocated_bytes": sum(event["snapshot_bytes"] for event in told),
        "keeper_uss_bytes": own,
        "ratio": held / state,
    }
    print(
        f"resident snapshot memory: {line['ratio']:.2f} bytes per byte of state ({state:,} bytes)"
    )
    print(f"a keeper's own: {statistics.median(own) / 1e6:.0f} MB")
    return [line]


def _segment_bytes(pid: int) -> int:
    """Proportional set size of the snapshots that a process maps."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(m.pss for m in maps if SEGMENT in m.path)


# ------------------------------------------------------------------------------------ main


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in RUNS.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--rounds", type=int, default=9)
        command.add_argument("--out", type=Path, default=Path("benchmarks/results"))
        if name == "reshard":
            command.add_argument("--mib", type=int, default=1000, help="of state, all ranks")
        else:
            preset = "decoder-15m" if name == "stall" else "decoder-1m"
            command.add_argument("--preset", default=preset)
            command.add_argument("--batch", type=int, default=2, help="samples per worker and step")
            command.add_argument("--seconds", type=float, default=5.0, help="of one turn")
            command.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    load = os.getloadavg()
    lines = arguments.run(arguments)
    values = {k: str(v) for k, v in vars(arguments).items() if k != "run"}
    record = {
        "command": " ".join(["benchmarks/state.py", *sys.argv[1:]]),
        "arguments": values,
        "processors": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "rounds": lines,
    }
    print(f"load: {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"state-{arguments.command}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


RUNS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "reshard": run_reshard,
    "stall": run_stall,
    "steps": run_steps,
    "restart": run_restart,
    "memory": run_memory,
}

if __name__ == "__main__":
    main()
