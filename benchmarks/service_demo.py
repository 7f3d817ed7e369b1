"""Three jobs of two priorities on a local cluster of four nodes: an urgent one comes and goes.

    python benchmarks/service_demo.py [FOLDER]

Each command is a terminal of its own, which is closed at once. Prints a table, and where the time
went until the urgent job trained; exits with 1 where something was lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from elastic_ft import Client

NODES = 4
URGENT_STEPS = 150
START_S, SOON_S = 150.0, 90.0
Job = dict[str, Any]


def job(steps: int, least: int, most: int) -> Job:
    return {
        "name": "demo",
        "steps": steps,
        "model": {"preset": "decoder-1m"},
        "data": {"url": "stdlib:", "max_tokens": 200_000, "sequence_length": 32},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "parallel": {"device": "cpu"},
        "snapshot": {"every_steps": 1},
        "elastic": {"min_workers": least, "max_workers": most},
    }


class Demo:
    def __init__(self, folder: Path) -> None:
        self.folder, self.began_s = folder, time.monotonic()
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.environment.pop("RAY_ADDRESS", None)
        self.client = Client()  # until it is known where

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:7.1f} s  {text}", flush=True)

    def terminal(self, *words: object) -> str:
        """A command in a process of its own, until it returns."""
        command = [sys.executable, "-m", "elastic_ft", *map(str, words)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self) -> None:
        config = self.folder / "config.yaml"
        config.write_text("cooldown_s: 2\n")
        options = ("--local-nodes", NODES, "--folder", self.folder / "service", "--port", 0)
        said = self.terminal("service", "start", *options, "--config", config)
        url = said.split()[-1]
        self.environment["ELASTIC_FT_SERVICE"] = url
        self.client = Client(url)
        self.say(f"the service runs on {NODES} local nodes: {url}")

    def submit(self, name: str, priority: int, values: Job) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        said = self.terminal("submit", path, "--priority", priority, "--name", name)
        self.say(f"submitted {said.split()[0]} (priority {priority}); its terminal is closed")
        return said.split()[0]

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> float:
        """Returns how long it took."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > timeout_s:
                raise SystemExit(
                    f"{what}: not within {timeout_s:g} s: {self.client.jobs(all=True)}"
                )
            time.sleep(0.05)
        self.say(what)
        return time.monotonic() - began_s

    def workers(self, id: str) -> int:
        return int(self.client.status(id)["workers"]["now"])


def pids(found: Job) -> dict[str, int]:
    return {member["worker"]: member["pid"] for member in found["members"]}


def show(demo: Demo) -> bool:
    demo.start()
    others = [demo.submit(name, 0, job(100_000, 1, 3)) for name in ("one", "two")]
    trains = lambda: all(demo.client.status(id)["step"] > 3 for id in others)  # noqa: E731
    full = lambda: sum(map(demo.workers, others)) == NODES  # noqa: E731
    demo.until("both train, on all nodes", lambda: trains() and full(), START_S)
    before = {id: demo.client.status(id) for id in others}
    urgent = demo.submit("urgent", 10, job(URGENT_STEPS, 2, 2))
    room = lambda: sum(map(demo.workers, others)) == NODES - 2  # noqa: E731
    demo.until("the others have given way, in place", room, SOON_S)
    shrunk = {id: demo.client.status(id) for id in others}
    demo.until("the urgent job trains", lambda: demo.client.status(urgent)["step"] > 0, START_S)
    ended = demo.client.wait(urgent, START_S)
    demo.say(f"the urgent job has ended: {ended['state']}")
    demo.until("the others have grown back", full, START_S)
    asked_s = ended["submitted_at_s"]
    after = {id: demo.client.status(id) for id in others}
    good = ended["state"] == "completed"
    rows = [("job", "workers", "gave way after", "paused", "steps lost", "survivors' pids")]
    for id in others:
        recovered = [e for e in demo.client.events(id) if e["event"] == "recovered"]
        gave = [e for e in recovered if e["world_after"] < e["world_before"]]
        lost = sum(e["steps_lost"] for e in recovered)
        known = pids(before[id])
        kept = all(known.get(w) == pid for w, pid in pids(shrunk[id]).items())
        stayed = pids(shrunk[id]).items() <= pids(after[id]).items()
        good = good and kept and stayed and not lost
        worlds = (str(found["workers"]["now"]) for found in (before[id], shrunk[id], after[id]))
        longest_s = max((e["paused_s"] for e in recovered), default=0.0)
        rows.append(
            (
                id,
                " -> ".join(worlds),
                f"{gave[0]['at_s'] - asked_s:.2f} s" if gave else "(had its minimum)",
                f"{longest_s:.2f} s at most",
                str(lost),
                "the same" if kept and stayed else "OTHERS",
            )
        )
    print_table(rows)
    stages = stages_of(demo, urgent)
    print(
        f"\n{urgent}, seconds from its submission: "
        + ", ".join(f"{what} {at_s - asked_s:.1f}" for what, at_s in stages)
    )
    return good


def stages_of(demo: Demo, urgent: str) -> list[tuple[str, float]]:
    """What was there when."""
    at_s: dict[str, float] = {}
    for event in demo.client.events(urgent):
        at_s[event["event"]] = event["at_s"]  # the last worker is ready
        if event["event"] == "generation_formed":
            break
    first = next(demo.client.steps(urgent))
    names = {
        "controller_started": "its controller runs",
        "worker_ready": "its workers are up",
        "generation_formed": "they have formed",
    }
    stages = [(what, at_s[name]) for name, what in names.items() if name in at_s]
    return [*stages, ("its first step is committed", first["committed_at_s"])]


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def main() -> int:
    words = sys.argv[1:]
    folder = Path(words[0] if words else tempfile.mkdtemp(prefix="service-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(folder)
    try:
        good = show(demo)
    finally:
        if "ELASTIC_FT_SERVICE" in demo.environment:
            demo.terminal("service", "stop", "--jobs", "stop")
            demo.say("the service, its jobs and its nodes have ended")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
