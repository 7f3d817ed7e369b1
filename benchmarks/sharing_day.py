"""Days of 1,000 jobs on 512 nodes: shared out by the real core, against three other ways.

python benchmarks/sharing_day.py

Jobs follow the marginals of the Helios trace (``sharing_jobs``); the other ways are gangs of fixed
width (``gang_queue``). Each load is a day of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table
from benchmarks.gang_queue import WAYS, GangQueue
from benchmarks.shared_cluster import SharedCluster, SubmittedWork, Times, speed
from benchmarks.sharing_jobs import DAY_S, HELIOS, PRIORITIES, submitted
from elastic_ft.service.service_config import ServiceConfig

DRAIN_S = (
    2 * DAY_S
)  # after the last: waits that have not ended by then count as if they ended there
SAMPLE_S = 60.0  # of what nodes do
OURS = "elastic_ft"


@dataclass(frozen=True)
class Setting:
    """``widest``: max_workers, in widths."""

    jobs: int = 1000
    nodes: int = 512
    days: int = 1
    checkpoint_s: float = 1800.0
    widest: float = 4.0

    @property
    def end_s(self) -> float:
        return self.days * DAY_S

    @property
    def node_s(self) -> float:
        return self.nodes * self.end_s


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def waits(
    found: dict[str, tuple[float, float | None]], until_s: float
) -> dict[str, dict[str, float]]:
    """By priority: from submission until it trains. Who never did: as long as it was watched."""
    rows: dict[str, dict[str, float]] = {}
    for name in PRIORITIES:
        mine = [
            (until_s if first is None else first) - at_s
            for job, (at_s, first) in found.items()
            if job.startswith(name)
        ]
        rows[name] = {"p50_s": quantile(mine, 0.5), "p95_s": quantile(mine, 0.95)}
        rows[name]["max_s"] = max(mine)
    return rows


def run_ours(jobs: Sequence[SubmittedWork], setting: Setting, times: Times) -> dict[str, Any]:
    nodes = [(f"n{i:03d}", 1) for i in range(setting.nodes)]
    world = SharedCluster(ServiceConfig().terms, nodes, jobs, times)
    began, until_s, held_s, active_s = time.process_time(), 0.0, 0.0, 0.0
    while until_s < setting.end_s:
        until_s += SAMPLE_S
        world.run(until_s)
        held_s += SAMPLE_S * sum(sum(run.places.values()) for run in world.jobs.values())
        active_s += SAMPLE_S * sum(run.active for run in world.jobs.values())
    useful = sum(run.work.width * world.progress_s(run) for run in world.jobs.values())
    ended = _ended(world.jobs.values(), setting)
    drained_s = setting.end_s + DRAIN_S
    while until_s < drained_s and any(r.first_began_s is None for r in world.jobs.values()):
        until_s += 3600
        world.run(until_s)
    runs = world.jobs.values()
    return {
        "goodput": useful / setting.node_s,
        "idle": 1 - held_s / setting.node_s,
        "starting": (held_s - active_s) / setting.node_s,
        "again": 0.0,
        "width": (active_s - useful) / setting.node_s,
        "ended": ended,
        "waits": waits({r.work.job: (r.work.at_s, r.first_began_s) for r in runs}, drained_s),
        "killed": 0,
        "suspended": sum(run.suspensions for run in runs),
        "resized": sum(run.resizes for run in runs),
        "cpu_s": round(time.process_time() - began, 2),
        "events": world.events,
    }


def run_gangs(
    jobs: Sequence[SubmittedWork], setting: Setting, times: Times, way: str
) -> dict[str, Any]:
    model = GangQueue(setting.nodes, way, times.start_s, setting.checkpoint_s)
    drained_s = setting.end_s + DRAIN_S
    spent = model.run(jobs, drained_s, setting.end_s)
    shares = {name: value / setting.node_s for name, value in asdict(spent).items()}
    return {
        "goodput": shares.pop("useful"),
        **shares,
        "width": 0.0,
        "ended": _ended(model.gangs, setting),
        "waits": waits({g.work.job: (g.work.at_s, g.first_s) for g in model.gangs}, drained_s),
        "killed": model.evictions,
        "suspended": 0,
        "resized": 0,
    }


def _ended(runs: Iterable[Any], setting: Setting) -> int:
    """Jobs, of all that were there, that have ended when the days have."""
    return sum(run.ended_s is not None and run.ended_s <= setting.end_s for run in runs)


def most_work(jobs: Sequence[SubmittedWork], setting: Setting, times: Times) -> float:
    """Node-seconds of work that no way of sharing exceeds, were it told the future: up to each job,
    all that those before it can do themselves; from it on, all that the nodes can."""
    found, earlier = setting.node_s, 0.0
    for work in sorted(jobs, key=lambda work: work.at_s):
        left_s = max(0.0, setting.end_s - work.at_s)
        found = min(found, earlier + setting.nodes * left_s)
        fastest = speed(work.wish.most, work.width, times.scaling)
        earlier += work.width * min(work.work_s, left_s * fastest)
    return min(found, earlier)


def one_load(seed: int, load: float, setting: Setting, times: Times) -> dict[str, Any]:
    jobs = submitted(seed, setting.jobs, setting.nodes, load, setting.widest, setting.days)
    most = most_work(jobs, setting, times) / setting.node_s
    found: dict[str, Any] = {"seed": seed, "load": load, "jobs": len(jobs), "most": most}
    found |= {way: run_gangs(jobs, setting, times, way) for way in WAYS}
    return found | {OURS: run_ours(jobs, setting, times)}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """``wait``: FIFO's urgent p95 over ours. ``goodput``: ours over that of evictions; ``strict``:
    of those in strict order; ``most``: that of who loses no node second and knows the future."""
    ours, evict = found[OURS], found["evict"]["goodput"]
    wait = found["fifo"]["waits"]["urgent"]["p95_s"] / ours["waits"]["urgent"]["p95_s"]
    return {
        "wait": wait,
        "goodput": ours["goodput"] / evict,
        "strict": ours["goodput"] / found["strict"]["goodput"],
        "most": found["most"] / evict,
    }


def at(load: float) -> str:
    return f"{load:.2f}" + " (the trace's)" * (load == HELIOS.load)


def by_load(runs: Sequence[dict[str, Any]]) -> list[tuple[float, list[dict[str, Any]]]]:
    loads = dict.fromkeys(run["load"] for run in runs)
    return [(load, [run for run in runs if run["load"] == load]) for load in loads]


def rows_of(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for load, mine in by_load(runs):
        for way in (*WAYS, OURS):

            def of(get: Callable[[Any], float], mine: list[Any] = mine, way: str = way) -> float:
                return statistics.median(get(run[way]) for run in mine)

            row = [f"{at(load)}: {way}", f"{of(lambda r: r['goodput']):.3f}"]
            for part in ("idle", "starting", "again", "width"):
                row.append(f"{of(lambda r, p=part: r[p]):.3f}")
            row.append(f"{of(lambda r: r['ended']):,.0f}")
            for priority in PRIORITIES:
                row.append(f"{of(lambda r, p=priority: r['waits'][p]['p50_s']):,.0f}")
                row.append(f"{of(lambda r, p=priority: r['waits'][p]['p95_s']):,.0f}")
            longest = max(run[way]["waits"][p]["max_s"] for run in mine for p in PRIORITIES)
            row.append(f"{longest:,.0f}")
            row += [f"{of(lambda r, k=k: r[k]):,.0f}" for k in ("killed", "suspended", "resized")]
            rows.append(row)
    return rows


def markdown(runs: Sequence[dict[str, Any]], setting: dict[str, Any], raw: str) -> str:
    titles = ["load: way", "goodput", "idle", "starting", "again", "width", "ended"]
    titles += [f"{priority} {part}" for priority in PRIORITIES for part in ("p50", "p95")]
    titles += ["longest wait", "killed", "suspended", "resized"]
    each = []
    for load, mine in by_load(runs):
        found = [ratios(run) for run in mine]
        row = [at(load), str(len(mine))]
        for name, digits in (("goodput", 2), ("most", 2), ("strict", 2), ("wait", 0)):
            values = [one[name] for one in found]
            low, high = min(values), max(values)
            spread = f" ({low:.{digits}f} to {high:.{digits}f})" if len(values) > 1 else ""
            row.append(f"{statistics.median(values):.{digits}f}{spread}")
        each.append(row)
    heads = ["load", "seeds", "goodput, ours / evict", "at most", "ours / strict"]
    heads += ["urgent p95 wait, fifo / ours"]
    said = ", ".join(f"{name} {value:g}" for name, value in setting.items())
    where = f"Trace: {HELIOS.source}. Setting: {said}. Raw: `{raw}`."
    return "\n\n".join([table(heads, each), table(titles, rows_of(runs)), where])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    loads = [0.7, HELIOS.load, 1.0, 1.3]
    parser.add_argument("--loads", type=float, nargs="+", default=loads, help="work over capacity")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", default="benchmarks/results/sharing-day.json")
    parser.add_argument("--document", default="docs/service.md", help="'' leaves it alone")
    for name, value in (asdict(Setting()) | asdict(Times())).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = vars(parser.parse_args())
    setting = Setting(**{name: given[name] for name in asdict(Setting())})
    times = Times(**{name: given[name] for name in asdict(Times())})
    runs = []
    for load in given["loads"]:
        for seed in given["seeds"]:
            runs.append(one_load(seed, load, setting, times))
            print(f"load {load:.2f}, seed {seed}: {ratios(runs[-1])}", flush=True)
    said = asdict(setting) | asdict(times)
    text = markdown(runs, said, given["out"])
    print(text)
    if given["out"]:
        Path(given["out"]).write_text(json.dumps({"setting": said, "runs": runs}, indent=1) + "\n")
    if given["document"]:
        put(Path(given["document"]), "sharing-day", text)


if __name__ == "__main__":
    main()
