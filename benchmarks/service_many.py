"""The service in a folder in which thousands of jobs have ended, and hundreds wait. Without Ray.

    python benchmarks/service_many.py --ended 1000 10000 --queued 500

A service's own code fills a folder: each job is submitted, begins, and ends by an event of its own,
so its journal has an object for each; its run folder has a result and a hundred steps. Then the
service is started there in a process of its own, as in ``service_load.py``, on a cluster that is
made up, and asked over HTTP, one question after the other. Decisions are those of the core alone,
on the state that the folder has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table
from benchmarks.service_load import JOB, WAIT_S, Served
from elastic_ft.core.scheduling import decide
from elastic_ft.core.sharing import asks
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service import Service
from elastic_ft.service.service_client import Client

NODES = 64
STEPS = 100  # lines of a run that has ended
STATES = ("completed", "completed", "completed", "failed")
PAGES = {  # what is asked for, and how it is called in the table
    "/": "the page at /",
    "/api/v1/jobs?all=0&limit=200&after=": "its list: 200 that have not ended",
    "/api/v1/jobs?all=1&limit=200&before=": "its list: the last 200 of all",
    "/api/v1/jobs": "GET /jobs, all that have not ended",
    "/api/v1/jobs?all=1": "GET /jobs?all=1, every job",
    "/api/v1/service": "GET /service",
    "/metrics": "GET /metrics",
}


class Filled:
    """A service that fills a folder. Of the cluster it sees ``NODES`` nodes of one slot."""

    def __init__(self, folder: Path) -> None:
        from elastic_ft.service import service as whole

        found: Any = whole
        found.abandoned = dict  # nobody asks Ray for anything: it would start a cluster
        found.ROUND_S = 3600.0  # what hands would tell is told here
        slots = {f"n{number:04}": 1 for number in range(NODES)}
        self._folder = folder
        self._service = Service(
            str(folder),
            asks.SharingTerms(),
            lambda job, url: None,
            print,
            lambda: Sight(time.monotonic(), slots, dict.fromkeys(slots, "here")),
        )
        self._service.start()
        self.office = self._service.office

    def submit(self) -> str:
        return self._service.submit({"job": JOB}, "").result(WAIT_S)

    def live(self, number: int) -> None:
        """A job from its submission to its end."""
        job = self.submit()
        at_s = time.time()
        for event in (asks.JobBegan(at_s, job, 1), asks.JobEnded(at_s, job, STATES[number % 4])):
            self.office.tell(event, "as asked", STEPS).result(WAIT_S)
        run = self._folder / "jobs" / job
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps({"status": STATES[number % 4], "reason": ""}))
        line = {
            "loss": 5.0,
            "tokens": 8192,
            "world_size": 1,
            "generation": 1,
            "committed_at_s": at_s,
        }
        lines = (json.dumps({"step": step, **line}) for step in range(1, STEPS + 1))
        (run / "steps.jsonl").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        self._service.close()


def filled(folder: Path, ended: int, queued: int) -> dict[str, Any]:
    """Figures of the folder, and of the core's decisions there."""
    service = Filled(folder)
    began_s = time.monotonic()
    for number in range(ended):
        service.live(number)
    for _ in range(queued + NODES):
        service.submit()
    spent_s = time.monotonic() - began_s
    decisions = decided(service, 100)
    service.close()
    return {
        "filled_s": spent_s,
        "decisions_ms": decisions,
        "journal": size(folder / "journal"),
        "snapshots": size(folder / "snapshots"),
        "orders": size(folder / "orders"),
    }


def size(folder: Path) -> dict[str, float]:
    files = [path.stat().st_size for path in folder.glob("*")]
    return {"objects": len(files), "mb": sum(files) / 2**20}


def decided(service: Filled, times: int) -> dict[str, list[float]]:
    """Milliseconds of each: one more is submitted; one ends, and another starts; a node goes, and
    comes back."""
    state, terms = service.office.standing.sharing, asks.SharingTerms()
    wish, took = next(iter(state.jobs.values())).wish, dict[str, list[float]]()
    nodes = tuple(sorted(state.nodes.items()))

    def told(what: str, event: asks.SharingEvent) -> None:
        nonlocal state
        began_s = time.perf_counter()
        state, _ = decide(state, event, terms)
        took.setdefault(what, []).append(1000 * (time.perf_counter() - began_s))

    for number in range(times):
        at_s = time.time()
        told("a submission", asks.JobSubmitted(at_s, f"more-{number}", wish))
        first = next(job.job for job in state.jobs.values() if job.has_room)
        told("an end, and a start", asks.JobEnded(at_s, first, "completed"))
        told("a node goes", asks.CapacityChanged(at_s, nodes[1:]))
        told("a node comes", asks.CapacityChanged(at_s, nodes))
    return took


def timed(ask: Callable[[], object]) -> float:
    """Milliseconds."""
    began_s = time.perf_counter()
    ask()
    return 1000 * (time.perf_counter() - began_s)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return bytes(answer.read())


def measured(folder: Path, repeats: int) -> dict[str, Any]:
    began_s = time.monotonic()
    served = Served(folder, NODES)
    try:
        get(f"{served.url}/api/v1/service")
        start_s, cpu_s = time.monotonic() - began_s, served.cpu_s
        memory_mb = served.memory_mb
        client = Client(served.url)
        until_s = time.monotonic() + WAIT_S
        while any(job["state"] == "starting" for job in client.jobs()):
            assert time.monotonic() < until_s, "jobs do not begin"
            time.sleep(0.5)
        asked = {
            what: [timed(partial(get, served.url + path)) for _ in range(repeats)]
            for path, what in PAGES.items()
        }
        asked["a submission"] = [timed(lambda: client.submit(JOB)) for _ in range(repeats)]
        sizes = {what: len(get(served.url + path)) for path, what in PAGES.items()}
        return {
            "start_s": start_s,
            "start_cpu_s": cpu_s,
            "memory_mb": memory_mb,
            "memory_after_mb": served.memory_mb,
            "asked_ms": asked,
            "bytes": sizes,
        }
    finally:
        served.kill()


def one_size(ended: int, queued: int, repeats: int) -> dict[str, Any]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        about = filled(folder, ended, queued)
        print(
            f"{ended} ended: {json.dumps({k: v for k, v in about.items() if k != 'decisions_ms'})}"
        )
        found = measured(folder, repeats)
    return {"ended": ended, "queued": queued} | about | found


def markdown(found: list[dict[str, Any]], options: argparse.Namespace) -> str:
    def row(what: str, of: Callable[[dict[str, Any]], str]) -> list[str]:
        return [what, *map(of, found)]

    def middle(values: list[float]) -> str:
        return f"{statistics.median(values):,.1f} ({max(values):,.0f})"

    def stored(what: str) -> Callable[[dict[str, Any]], str]:
        return lambda one: f"{one[what]['objects']:,} of {one[what]['mb']:.1f} MB"

    rows = [
        row("start, to its first answer, s", lambda one: f"{one['start_s']:.1f}"),
        row("its CPU time till then, s", lambda one: f"{one['start_cpu_s']:.1f}"),
        row("memory then, MB", lambda one: f"{one['memory_mb']:.0f}"),
        row("memory after all of this, MB", lambda one: f"{one['memory_after_mb']:.0f}"),
        *(
            row(f"{what}, ms", lambda one, what=what: middle(one["asked_ms"][what]))  # type: ignore[misc]
            for what in found[0]["asked_ms"]
        ),
        *(
            row(
                f"decided: {what}, ms",
                lambda one, what=what: middle(one["decisions_ms"][what]),  # type: ignore[misc]
            )
            for what in found[0]["decisions_ms"]
        ),
        row("objects of its journal", stored("journal")),
        row("of snapshots", stored("snapshots")),
        row("of orders", stored("orders")),
    ]
    head = ["", *(f"{one['ended']:,} ended, {one['queued']:,} queued" for one in found)]
    return "\n\n".join(
        [
            table(head, rows),
            f"{NODES} jobs run. Milliseconds: the median, and the longest of {options.repeats} "
            f"(100 decisions). {os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}. "
            f"Raw: `{options.out}`.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ended", type=int, nargs="+", default=[0, 1000, 10_000])
    parser.add_argument("--queued", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", default="benchmarks/results/service-many.json")
    parser.add_argument("--document", default="docs/benchmarks.md", help="'' leaves it alone")
    options = parser.parse_args()
    found = [one_size(ended, options.queued, options.repeats) for ended in options.ended]
    text = markdown(found, options)
    print(text)
    if options.out:
        about = {"python": platform.python_version(), "sizes": found}
        Path(options.out).write_text(json.dumps(about) + "\n")
    if options.document:
        put(Path(options.document), "service-many", text)


if __name__ == "__main__":
    main()
