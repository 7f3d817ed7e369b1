"""Whoever is in charge of a job on plain processes is killed, or stopped, again and again.

    python benchmarks/in_charge.py --strategy fsdp --times 20 --seed 7

Two workers on two nodes; the faults below in random order, each so often. After each: every worker
but a killed one still has its process, and steps go on. At the end: each step once, none lost, and
losses are those of the same job undisturbed. The figure is the longest time between two trained
steps. The same on Ray: ``make soak-in-charge``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_ft.config import Job, parse_job
from elastic_ft.hosts.local import run_local
from elastic_ft.hosts.local.detached import DetachedRun
from elastic_ft.hosts.local.orders import ticks_of
from elastic_ft.observe import stop_request
from elastic_ft.observe.run_folder import read_lines

DEADLINE_S = 180.0
STOPPED_S = 4.0
STEPS = 10  # committed before and after each fault
NODES = {"n0": 1, "n1": 1}


def make_job(strategy: str, steps: int) -> Job:
    return parse_job(
        {
            "name": f"in-charge-{strategy}",
            "steps": steps,
            "model": {"preset": "decoder-1m", "kwargs": {"dim": 32, "n_layers": 2, "n_heads": 2}},
            "data": {"url": "stdlib:", "vocab_size": 300, "sequence_length": 32},
            "batch": {"global_batch_size": 8, "micro_batch_size": 1},
            "optimizer": {"schedule": "constant"},  # the same for however many steps
            "parallel": {"strategy": strategy},
            "elastic": {"min_workers": 1, "max_workers": 2, "gather_s": 60},
            "checkpoint": {"every_steps": 100_000},
        }
    )


class Soaked:
    """A job that nobody owns, and what is seen of it."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.folder = folder
        self.run = DetachedRun(job, str(folder), f"{folder}/checkpoints", NODES)
        self.run.start()

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [line for line in read_lines(path) if line["event"] == name]

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "steps.jsonl"
        return read_lines(path) if path.exists() else []

    def until(self, what: str, condition: Callable[[], Any]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > until_s:
                raise TimeoutError(f"waited {DEADLINE_S:g} s for {what}; see {self.folder}")
            time.sleep(0.05)

    def train_on(self) -> None:
        due = len(self.steps()) + STEPS
        self.until(f"{STEPS} more steps", lambda: len(self.steps()) >= due)

    def whole(self) -> None:
        self.until("two workers", lambda: (s := self.steps()) and s[-1]["world_size"] == 2)
        self.until("a launcher and a controller", self.is_led)
        self.train_on()

    def is_led(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return bool(self.run.launcher_pid()) and self.kept("controller") > 0
        return False

    def kept(self, kind: str) -> int:
        return sum(process.kind == kind for process in self.run.processes())

    def workers(self) -> list[int]:
        return [member["pid"] for member in self.events("generation_formed")[-1]["members"]]

    def pid(self, kind: str) -> int:
        """Of the newest controller or keeper, or the launcher."""
        if kind == "launcher":
            return self.run.launcher_pid()
        return [process.pid for process in self.run.processes() if process.kind == kind][-1]


def kill(run: Soaked, *kinds: str) -> None:
    pids = [run.workers()[1] if kind == "worker" else run.pid(kind) for kind in kinds]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def stop_for_a_while(run: Soaked, kind: str) -> None:
    pid = run.pid(kind)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    with contextlib.suppress(ProcessLookupError):  # it was replaced, and killed
        os.kill(pid, signal.SIGCONT)


KILLED = {
    "controller": ("controller",),
    "launcher": ("launcher",),
    "controller_and_launcher": ("controller", "launcher"),
    "controller_and_keeper": ("controller", "keeper"),
    "controller_and_worker": ("controller", "worker"),
    "launcher_and_worker": ("launcher", "worker"),
}
STOPPED = {"controller_stopped": "controller", "launcher_stopped": "launcher"}


def one_fault(run: Soaked, name: str) -> float:
    """Returns the longest time between two trained steps meanwhile. Raises AssertionError."""
    run.whole()
    pids, before, began_s = run.workers(), len(run.events("in_charge")), time.time()
    if name in STOPPED:
        stop_for_a_while(run, STOPPED[name])
    else:
        kill(run, *KILLED[name])
    if name.startswith("controller") and name not in STOPPED:
        run.until("the next controller", lambda: len(run.events("in_charge")) > before)
    run.train_on()
    ended = [pid for pid in pids if not ticks_of(pid)]
    assert len(ended) == ("worker" in name), f"{name}: of {pids} ended {ended}"
    at_s = [line["applied_at_s"] for line in run.steps()]
    recent = [at for at in at_s if at > began_s - 2]
    return max((b - a for a, b in itertools.pairwise(recent)), default=0.0)


@contextlib.contextmanager
def soaked(job: Job, folder: Path) -> Iterator[Soaked]:
    run = Soaked(job, folder)
    try:
        yield run
    finally:
        stop_request.ask_to_stop(str(folder), now=True)
        run.until("its end", lambda: run.run.poll(0.2))
        run.run.close()


def check(run: Soaked, strategy: str, scratch: Path) -> dict[str, Any]:
    """Raises AssertionError where a step was lost, was trained twice, or has another loss."""
    steps = run.steps()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "not each step once"
    assert not run.events("rolled_back") and not run.events("controller_restarted")
    run_local(make_job(strategy, len(steps)), str(scratch / "undisturbed"), nodes=NODES)
    same = read_lines(scratch / "undisturbed" / "steps.jsonl")
    pairs = [(a["loss"], b["loss"]) for a, b in zip(steps, same, strict=True)]
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    assert apart < 1e-3, f"losses differ by {apart:.2e}"
    return {"steps": len(steps), "losses_apart_max": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fsdp", choices=["ddp", "fsdp"])
    parser.add_argument("--times", type=int, default=20, help="each fault")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    order = [name for name in (*KILLED, *STOPPED) for _ in range(arguments.times)]
    random.Random(arguments.seed).shuffle(order)
    print(f"seed {arguments.seed}: {' '.join(order)}", flush=True)
    gaps: dict[str, list[float]] = {name: [] for name in (*KILLED, *STOPPED)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with soaked(make_job(arguments.strategy, 10**6), folder / "run") as run:
            for name in order:
                gaps[name].append(round(one_fault(run, name), 3))
                print(f"{name}: {gaps[name][-1]:.2f} s", flush=True)
        found = check(run, arguments.strategy, folder)
    for name, values in gaps.items():
        median, most = statistics.median(values), max(values)
        print(f"{name} x{len(values)}: longest gap {median:.2f} s, at most {most:.2f} s")
    out = Path(arguments.out) / f"in-charge-{arguments.strategy}-processes.json"
    told = {"arguments": vars(arguments), "order": order, "gap_s": gaps, **found}
    out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
