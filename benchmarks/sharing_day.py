"""A day of 1,000 jobs on 512 nodes: shared out by the real core, against two other ways.

python benchmarks/sharing_day.py

Jobs follow the marginals of the Helios trace (``HELIOS``), one of its GPUs standing for one node.
``fifo``: gangs in the order of submission. ``evict``: gangs by priority, who does not fit is
skipped (Kueue's BestEffortFIFO), and what an urgent job needs is taken by killing the lowest and
newest, which go back to the front of the queue and to their last checkpoint.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.document import put, table
from elastic_ft.core.sharing.asks import SharingTerms, Wish
from elastic_ft.sim.shared_cluster import SharedCluster, SubmittedWork, Times

DAY_S = 86_400.0
DRAIN_S = 3 * DAY_S  # waits that have not ended by then count as if they ended there
PRIORITIES = {"urgent": (10, 0.1), "normal": (5, 0.6), "low": (0, 0.3)}  # and how many are so
LONGEST_S = 7 * DAY_S
BURSTS = 0.3  # of the jobs come with the one before
LAYOUT_FROM, LAYOUT_UNIT = 32, 8  # so large jobs have layouts, and change by 8


@dataclass(frozen=True)
class Marginals:
    """Of GPU jobs. ``gpu_s``: all GPU time over all jobs."""

    mean_s: float
    median_s: float
    mean_gpus: float
    gpu_s: float
    source: str


# Row "total": avg_run_time_gpu, med_run_time_gpu, avg_gpu_num; {complete,cancel,fail}_gpu_time
# over gpu_job_num.
HELIOS = Marginals(
    6651.681,
    206.0,
    3.716,
    (39_994_296_320 + 30_715_109_125 + 7_288_334_702) / 1_580_464,
    "Helios, April to September 2020, 1,580,464 GPU jobs (Hu et al., SC '21): "
    "helios_cluster_summary.csv of github.com/S-Lab-System-Group/HeliosArtifact",
)


@dataclass(frozen=True)
class Fit:
    """Jobs of 2**k GPUs with weight ``ratio**k``; log-normal times, longer by ``longer`` per k."""

    ratio: float
    mu: float
    sigma: float
    longer: float

    def weights(self) -> list[float]:
        return [self.ratio**k for k in range(9)]


def bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the growing ``f`` is 0."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return low


def fitted(to: Marginals) -> Fit:
    """Has the trace's mean and median time, mean GPUs, and mean GPU time, which ties the two."""

    def mean(of: Callable[[int], float], ratio: float) -> float:
        weights = [ratio**k for k in range(9)]
        return sum(w * of(k) for k, w in enumerate(weights)) / sum(weights)

    ratio = bisect(lambda r: mean(lambda k: 2.0**k, r) - to.mean_gpus, 0.01, 1.0)

    def given(longer: float, sigma: float) -> float:
        """mu, for the mean time."""
        spread = mean(lambda k: 2.718281828459045 ** (longer * k + sigma**2 / 2), ratio)
        return _log(to.mean_s / spread)

    def sigma_for(longer: float) -> float:
        def over(sigma: float) -> float:
            mu = given(longer, sigma)
            below = mean(lambda k: NormalDist(mu + longer * k, sigma).cdf(_log(to.median_s)), ratio)
            return below - 0.5

        return bisect(over, 0.5, 4.0)

    def gpu_time(longer: float) -> float:
        sigma = sigma_for(longer)
        mu = given(longer, sigma)
        whole = mean(lambda k: 2.0**k * _exp(mu + longer * k + sigma**2 / 2), ratio)
        return whole - to.gpu_s

    longer = bisect(gpu_time, 0.0, 1.5)
    sigma = sigma_for(longer)
    return Fit(ratio, given(longer, sigma), sigma, longer)


def _log(value: float) -> float:
    from math import log

    return log(value)


def _exp(value: float) -> float:
    from math import exp

    return exp(value)


def drawn(
    fit: Fit, rng: random.Random, count: int, from_s: float, nodes: int
) -> list[tuple[float, int, float, str]]:
    """``count`` jobs of a day: when, how wide, how long, how urgent. More by day than by night."""
    names = list(PRIORITIES)
    found, at_s = [], from_s
    for index in range(count):
        while index == 0 or rng.random() > BURSTS:
            at_s = from_s + rng.uniform(0, DAY_S)
            hour = abs((at_s - from_s) / DAY_S - 0.5) * 2  # 0 at noon, 1 at midnight
            if rng.random() < 1 - 0.6 * hour:
                break
        k = rng.choices(range(9), fit.weights())[0]
        long_s = min(LONGEST_S, rng.lognormvariate(fit.mu + fit.longer * k, fit.sigma))
        name = rng.choices(names, [share for _, share in PRIORITIES.values()])[0]
        found.append((at_s, min(2**k, nodes), long_s, name))
    return found


def day(seed: int, count: int, nodes: int, load: float, widest: float) -> list[SubmittedWork]:
    """A day's jobs, and first those of the days before that still run at midnight: ``before-``.

    All times are stretched alike until what they would use of that day, if none had to wait, is
    ``load`` of what the nodes have.
    """
    fit, rng = fitted(HELIOS), random.Random(f"sharing day {seed}")
    jobs = drawn(fit, rng, count, 0.0, nodes)
    days = int(LONGEST_S / DAY_S)
    for index in range(1, days + 1):
        jobs += drawn(fit, rng, count, -index * DAY_S, nodes)

    def used(stretch: float) -> float:
        return sum(
            width * max(0.0, min(DAY_S, at_s + stretch * long_s) - max(0.0, at_s))
            for at_s, width, long_s, _ in jobs
        )

    stretch = bisect(lambda by: used(by) - load * nodes * DAY_S, 0.05, 50.0)
    found = []
    for index, (at_s, width, long_s, name) in enumerate(sorted(jobs)):
        left_s = stretch * long_s + min(0.0, at_s)
        if left_s > 0:
            unit = LAYOUT_UNIT if width >= LAYOUT_FROM else 1
            most = min(nodes, max(width, int(width * widest)))
            wish = Wish(max(1, width // 2), most, unit, priority=PRIORITIES[name][0])
            job = f"{'before-' if at_s < 0 else ''}{name}-{index}"
            found.append(SubmittedWork(max(0.0, at_s), job, wish, width, left_s))
    return found


# ------------------------------------------------------------------------------- the other ways


@dataclass(eq=False)
class Gang:
    work: SubmittedWork
    done_s: float = 0.0
    began_s: float | None = None  # trains since
    first_s: float | None = None
    version: int = 0
    front: bool = False


@dataclass
class GangQueue:
    """Gangs of fixed width. ``evict``: see the module's docstring; else FIFO."""

    nodes: int
    evict: bool
    start_s: float
    checkpoint_s: float
    now_s: float = 0.0
    free: int = 0
    waiting: list[Gang] = field(default_factory=list)
    running: list[Gang] = field(default_factory=list)
    gangs: list[Gang] = field(default_factory=list)
    evictions: int = 0
    redone_node_s: float = 0.0
    queue: list[tuple[float, int, Gang, int]] = field(default_factory=list)

    def run(self, jobs: Sequence[SubmittedWork], until_s: float, goodput_at_s: float) -> float:
        """Returns node-seconds of work done by ``goodput_at_s``."""
        self.free = self.nodes
        for count, work in enumerate(jobs):
            heapq.heappush(self.queue, (work.at_s, count, Gang(work), -1))
        useful = -1.0
        while self.queue and self.queue[0][0] <= until_s:
            if useful < 0 and self.queue[0][0] > goodput_at_s:
                self.now_s = goodput_at_s
                useful = self._useful()
            self.now_s, _, gang, version = heapq.heappop(self.queue)
            if version == -1:
                self.gangs.append(gang)
                self.waiting.append(gang)
            elif version != gang.version:
                continue
            else:
                gang.done_s = gang.work.work_s
                self.running.remove(gang)
                self.free += gang.work.width
                gang.began_s = None
            self._schedule()
        return useful if useful >= 0 else self._useful()

    def _progress(self, gang: Gang) -> float:
        spent_s = 0.0 if gang.began_s is None else max(0.0, self.now_s - gang.began_s)
        return gang.done_s + spent_s

    def _useful(self) -> float:
        return sum(gang.work.width * self._progress(gang) for gang in self.gangs)

    def _schedule(self) -> None:
        if self.evict:
            self.waiting.sort(key=lambda g: (-g.work.wish.priority, not g.front, g.work.at_s))
        left = []
        for index, gang in enumerate(self.waiting):
            if gang.work.width > self.free and self.evict:
                left += self._make_room(gang)
            if gang.work.width <= self.free:
                self._start(gang)
                continue
            left.append(gang)
            if not self.evict:
                left += self.waiting[index + 1 :]
                break
        self.waiting = left

    def _make_room(self, gang: Gang) -> list[Gang]:
        lower = [g for g in self.running if g.work.wish.priority < gang.work.wish.priority]
        lower.sort(key=lambda g: (g.work.wish.priority, -(g.began_s or 0.0)))
        chosen, free = [], self.free
        for other in lower:
            if free >= gang.work.width:
                break
            chosen.append(other)
            free += other.work.width
        if free < gang.work.width:
            return []
        for other in chosen:
            spent_s = self._progress(other) - other.done_s
            lost_s = spent_s % self.checkpoint_s
            self.redone_node_s += lost_s * other.work.width
            other.done_s += spent_s - lost_s
            other.began_s, other.front = None, True
            other.version += 1
            self.running.remove(other)
            self.free += other.work.width
            self.evictions += 1
        return chosen

    def _start(self, gang: Gang) -> None:
        self.free -= gang.work.width
        self.running.append(gang)
        gang.version += 1
        gang.began_s = self.now_s + self.start_s
        if gang.first_s is None:
            gang.first_s = gang.began_s
        ends_s = gang.began_s + gang.work.work_s - gang.done_s
        heapq.heappush(self.queue, (ends_s, id(gang), gang, gang.version))


# ------------------------------------------------------------------------------------ one run


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def waits(found: dict[str, tuple[float, float | None]]) -> dict[str, dict[str, float]]:
    """By priority: from submission until it trains. Who never did: as long as it was watched."""
    rows: dict[str, dict[str, float]] = {}
    for name in PRIORITIES:
        mine = [
            (DRAIN_S if first is None else first) - at_s
            for job, (at_s, first) in found.items()
            if job.startswith(name)
        ]
        rows[name] = {"p50_s": quantile(mine, 0.5), "p95_s": quantile(mine, 0.95)}
        rows[name]["max_s"] = max(mine)
    return rows


def run_ours(jobs: Sequence[SubmittedWork], nodes: int, times: Times) -> Any:
    world = SharedCluster(SharingTerms(), [(f"n{i:03d}", 1) for i in range(nodes)], jobs, times)
    began = time.process_time()
    world.run(DAY_S)
    useful = sum(run.work.width * world.progress_s(run) for run in world.jobs.values())
    until_s = DAY_S
    while until_s < DRAIN_S and any(r.first_began_s is None for r in world.jobs.values()):
        until_s += 3600
        world.run(until_s)
    runs = world.jobs.values()
    return {
        "goodput": useful / (nodes * DAY_S),
        "waits": waits({r.work.job: (r.work.at_s, r.first_began_s) for r in runs}),
        "killed": 0,
        "suspended": sum(run.suspensions for run in runs),
        "resized": sum(run.resizes for run in runs),
        "cpu_s": round(time.process_time() - began, 2),
        "events": world.events,
    }


def run_gangs(jobs: Sequence[SubmittedWork], nodes: int, model: GangQueue) -> Any:
    useful = model.run(jobs, DRAIN_S, DAY_S)
    return {
        "goodput": useful / (nodes * DAY_S),
        "waits": waits({g.work.job: (g.work.at_s, g.first_s) for g in model.gangs}),
        "killed": model.evictions,
        "suspended": 0,
        "resized": 0,
    }


def one_day(
    seed: int,
    count: int,
    nodes: int,
    load: float,
    times: Times,
    checkpoint_s: float,
    widest: float,
) -> dict[str, Any]:
    jobs = day(seed, count, nodes, load, widest)
    fifo = GangQueue(nodes, False, times.start_s, checkpoint_s)
    evict = GangQueue(nodes, True, times.start_s, checkpoint_s)
    return {
        "seed": seed,
        "before": len(jobs) - count,
        "fifo": run_gangs(jobs, nodes, fifo),
        "evict": run_gangs(jobs, nodes, evict),
        "elastic_ft": run_ours(jobs, nodes, times),
    }


def ratios(found: dict[str, Any]) -> tuple[float, float]:
    """FIFO's urgent p95 wait over ours; our goodput over that of evictions."""
    ours = found["elastic_ft"]
    wait = found["fifo"]["waits"]["urgent"]["p95_s"] / ours["waits"]["urgent"]["p95_s"]
    return wait, ours["goodput"] / found["evict"]["goodput"]


def markdown(days: Sequence[dict[str, Any]], setting: dict[str, Any], raw: str) -> str:
    rows = []
    for name in ("fifo", "evict", "elastic_ft"):
        mine = [found[name] for found in days]

        def of(get: Callable[[Any], float], mine: list[Any] = mine) -> float:
            return statistics.median(get(run) for run in mine)

        row = [name, f"{of(lambda r: r['goodput']):.3f}"]
        for priority in PRIORITIES:
            for part in ("p50_s", "p95_s"):
                row.append(f"{of(lambda r, a=priority, b=part: r['waits'][a][b]):,.0f}")
        longest = max(run["waits"][p]["max_s"] for run in mine for p in PRIORITIES)
        row += [f"{longest:,.0f}"]
        row += [f"{of(lambda r, k=k: r[k]):,.0f}" for k in ("killed", "suspended", "resized")]
        rows.append(row)
    titles = ["", "goodput", *(f"{p} {q}" for p in PRIORITIES for q in ("p50", "p95"))]
    titles += ["longest wait", "killed", "suspended", "resized"]
    each = [
        [str(d["seed"]), str(d["before"]), f"{ratios(d)[0]:.0f}", f"{ratios(d)[1]:.2f}"]
        for d in days
    ]
    return "\n\n".join(
        [
            table(titles, rows),
            table(
                ["seed", "running at midnight", "urgent p95, fifo / ours", "goodput, ours / evict"],
                each,
            ),
            f"Trace: {HELIOS.source}. Setting: "
            + ", ".join(f"{k} {v:g}" for k, v in setting.items())
            + f". Raw: `{raw}`.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--checkpoint-s", type=float, default=1800.0)
    parser.add_argument("--load", type=float, default=1.0, help="work over what nodes can do")
    parser.add_argument("--widest", type=float, default=4.0, help="max_workers, in widths")
    parser.add_argument("--out", default="benchmarks/results/sharing-day.json")
    parser.add_argument("--document", default="docs/service.md", help="'' leaves it alone")
    for name, value in asdict(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    arguments = parser.parse_args()
    times = Times(**{name: getattr(arguments, name) for name in asdict(Times())})
    setting = {name: getattr(arguments, name) for name in ("jobs", "nodes", "load")}
    setting |= asdict(times)
    setting |= {"checkpoint_s": arguments.checkpoint_s, "widest": arguments.widest}
    rest = (arguments.checkpoint_s, arguments.widest)
    days = [
        one_day(seed, arguments.jobs, arguments.nodes, arguments.load, times, *rest)
        for seed in arguments.seeds
    ]
    text = markdown(days, setting, arguments.out)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"setting": setting, "days": days}, indent=1))
    if arguments.document:
        put(Path(arguments.document), "sharing-day", text)


if __name__ == "__main__":
    main()
