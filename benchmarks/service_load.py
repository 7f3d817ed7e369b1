"""The service under load, without a cluster: many jobs at once, and many who look at them.

    python benchmarks/service_load.py --jobs 200 --clients 50 --seconds 60

The real service (journal, office, hands, HTTP) in a process of its own, on a cluster that is made
up: half of the jobs find room there, and their run folders grow by a step a second. All jobs are
submitted at once, each by a thread of its own; then each client asks ``--every-s`` for one of: all
jobs, one job, the service, and a small file, which shows what the machine has left. In the middle
the service is killed, and another goes on in its folder: nothing may be lost, or there twice.
Seconds are the clients', who share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table
from elastic_ft.service.service_client import Client

JOB: dict[str, Any] = {
    "name": "load",
    "steps": 100_000,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:"},
}
PORT_FILE = "port"
QUESTIONS = ("all jobs", "one job", "the service", "a file, to compare")
WAIT_S = 180.0  # on a busy machine


def serve(folder: str, nodes: int) -> None:
    """In the service's process, until it is killed."""
    from aiohttp import web

    from elastic_ft.core.sharing.asks import SharingTerms
    from elastic_ft.service import hands
    from elastic_ft.service import service as whole
    from elastic_ft.service.api import Api
    from elastic_ft.service.cluster_watch import Sight
    from elastic_ft.service.service import Service

    led: set[str] = set()
    found: Any = whole
    found.abandoned = dict  # nobody asks Ray for anything: it would start a cluster
    found = hands
    found.actor_named = lambda name: name if name in led else None
    found.end_actor = led.discard
    found.clear_away = lambda *_: None
    found.groups_of = lambda prefix: {}
    slots = {f"n{number:04}": 1 for number in range(nodes)}

    def look() -> Sight:
        prefixes = frozenset(name.removesuffix("controller") for name in led)
        return Sight(time.monotonic(), slots, dict.fromkeys(slots, "here"), {}, prefixes)

    def begin(job: Any, run_url: str) -> None:
        led.add(hands.RunNames(job.name, run_url).controller)
        _begin_run(Path(run_url))

    for path in Path(folder).glob("jobs/*/events.jsonl"):  # an earlier service's
        led.add(hands.RunNames("load", str(path.parent)).controller)
    service = Service(folder, SharingTerms(), begin, lambda why: os._exit(3), look)
    service.start()

    async def run() -> None:
        runner = web.AppRunner(Api(service, {}, print).application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = Path(folder, PORT_FILE)
        file.with_suffix(".tmp").write_text(str(runner.addresses[0][1]))
        file.with_suffix(".tmp").replace(file)
        await asyncio.Event().wait()

    asyncio.run(run())


def _begin_run(run: Path) -> None:
    formed = {
        "event": "generation_formed",
        "seq": 0,
        "at_s": time.time(),
        "generation": 1,
        "step": 0,
        "world_size": 1,
        "layout": "ddp1",
        "members": [{"worker": "w0", "rank": 0, "pid": 1, "node": "n", "host": "here"}],
    }
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(formed) + "\n")


class Served:
    """The service's process."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, nodes
        self._begin()

    def _begin(self) -> None:
        folder = self._folder
        (folder / PORT_FILE).unlink(missing_ok=True)
        command = [sys.executable, __file__, "--serve", str(folder), "--nodes", str(self._nodes)]
        self.process = psutil.Popen(command, stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + WAIT_S
        while not (folder / PORT_FILE).exists():
            if time.monotonic() > until_s or self.process.poll() is not None:
                self.kill()
                raise RuntimeError("the service does not start")
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{(folder / PORT_FILE).read_text()}"

    @property
    def memory_mb(self) -> float:
        return float(self.process.memory_info().rss / 2**20)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def begin_again(self) -> None:
        self.kill()
        self._begin()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Growing:
    """Run folders grow by a step a second."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.over = folder, threading.Event()
        threading.Thread(target=self._grow, daemon=True).start()

    def _grow(self) -> None:
        step = 0
        while not self.over.wait(1.0):
            step += 1
            line = {"step": step, "loss": 5.0, "tokens": 8192, "world_size": 1, "generation": 1}
            text = json.dumps(line | {"committed_at_s": time.time()}) + "\n"
            for events in self._folder.glob("jobs/*/events.jsonl"):
                with events.with_name("steps.jsonl").open("a") as file:
                    file.write(text)


def polled(url: str, jobs: list[str], number: int, until_s: float, every_s: float) -> list[Any]:
    """(what, seconds) of each answer."""
    client, took = Client(url), list[Any]()
    time.sleep(every_s * (number % 10) / 10)
    turn = number
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        what = QUESTIONS[turn % len(QUESTIONS)]
        match what:
            case "all jobs":
                assert len(client.jobs()) == len(jobs)
            case "one job":
                client.status(jobs[turn % len(jobs)])
            case "the service":
                client.service()
            case _:
                with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                    answer.read()
        took.append((what, time.monotonic() - began_s))
        turn += 1
        time.sleep(max(0.0, began_s + every_s - time.monotonic()))
    return took


def timed_submit(url: str) -> tuple[str, float]:
    began_s = time.monotonic()
    id = Client(url).submit(JOB)["id"]
    return str(id), time.monotonic() - began_s


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    served = Served(folder, options.jobs // 2)
    try:
        return measured(options, folder, served)
    finally:
        served.kill()


def measured(options: argparse.Namespace, folder: Path, served: Served) -> dict[str, Any]:
    idle_mb = served.memory_mb
    with ThreadPoolExecutor(options.jobs) as pool:
        began_s = time.monotonic()
        answers = list(pool.map(timed_submit, [served.url] * options.jobs))
        all_s = time.monotonic() - began_s
    ids = [id for id, _ in answers]
    assert len(set(ids)) == options.jobs, "one is there twice"
    growing = Growing(folder)
    until_s = time.monotonic() + WAIT_S
    while states(served.url)["running"] < options.jobs // 2 and time.monotonic() < until_s:
        time.sleep(0.2)
    parts = []
    for _ in range(2):
        began_s, cpu_s = time.monotonic(), served.cpu_s
        end_s = began_s + options.seconds / 2
        with ThreadPoolExecutor(options.clients) as pool:
            asked = [
                pool.submit(polled, served.url, ids, number, end_s, options.every_s)
                for number in range(options.clients)
            ]
            half = [answer for one in asked for answer in one.result()]
        parts += half
        answered = len(half)
        spent_s, used_s = time.monotonic() - began_s, served.cpu_s - cpu_s
        memory_mb = served.memory_mb
        served.begin_again()
    found = [job["id"] for job in Client(served.url).jobs(all=True)]
    counted = states(served.url)
    growing.over.set()
    return {
        "submissions": [seconds for _, seconds in answers],
        "all_submitted_s": all_s,
        "polls": parts,
        "lost": len(set(ids) - set(found)),
        "twice": len(found) - len(set(found)),
        "states": counted,
        "idle_mb": idle_mb,
        "memory_mb": memory_mb,
        "cpu_share": used_s / spent_s,
        "cpu_ms": 1000 * used_s / answered,
    }


def states(url: str) -> Counter[str]:
    return Counter(job["state"] for job in Client(url).jobs())


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def markdown(found: dict[str, Any], options: argparse.Namespace) -> str:
    asked = {"submit": found["submissions"]}
    for what, seconds in found["polls"]:
        asked.setdefault(what, []).append(seconds)
    rows = [
        [what, f"{len(took):,}", *(f"{1000 * quantile(took, q):,.0f}" for q in (0.5, 0.99, 1.0))]
        for what, took in asked.items()
    ]
    counted = ", ".join(f"{count} {state}" for state, count in sorted(found["states"].items()))
    return "\n\n".join(
        [
            table(["asked", "answers", "p50 ms", "p99 ms", "longest ms"], rows),
            f"{options.jobs} jobs submitted at once, all answered within "
            f"{found['all_submitted_s']:.1f} s; then {options.clients} clients for "
            f"{options.seconds:g} s, each asking every {options.every_s:g} s, the service killed "
            f"in the middle: {found['lost']} jobs lost, {found['twice']} twice ({counted}). Memory "
            f"{found['idle_mb']:.0f} MB idle, {found['memory_mb']:.0f} MB in the end; "
            f"{found['cpu_share']:.0%} of a core, {found['cpu_ms']:.1f} ms for each answer, all "
            f"else included. {os.cpu_count()} cores, shared with the clients, "
            f"load {os.getloadavg()[1]:.0f}.",
            "The small file, of the same server, shows what the machine had left; what the others "
            f"take beyond it is theirs. Raw: `{options.out}`.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--out", default="benchmarks/results/service-load.json")
    parser.add_argument("--document", default="docs/service.md", help="'' leaves it alone")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.nodes)
        return
    with TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    text = markdown(found, options)
    print(text)
    if options.out:
        about = {"python": platform.python_version(), "jobs": options.jobs}
        Path(options.out).write_text(json.dumps(about | found) + "\n")
    if options.document:
        put(Path(options.document), "service-load", text)


if __name__ == "__main__":
    main()
