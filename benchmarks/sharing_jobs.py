"""Jobs of some days with the marginals of a public trace: Helios, one of its GPUs for one node."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from benchmarks.shared_cluster import SubmittedWork
from elastic_ft.core.sharing.asks import Wish

DAY_S = 86_400.0
PRIORITIES = {"urgent": (10, 0.1), "normal": (5, 0.6), "low": (0, 0.3)}  # and how many are so
LONGEST_S = 7 * DAY_S
BURSTS = 0.3  # of the jobs come with the one before
LAYOUT_FROM, LAYOUT_UNIT = 32, 8  # so large jobs have layouts, and change by 8


@dataclass(frozen=True)
class Marginals:
    """Of GPU jobs. ``gpu_s``: all GPU time over all jobs. ``load``: all GPU time over all that the
    GPUs had."""

    mean_s: float
    median_s: float
    mean_gpus: float
    gpu_s: float
    load: float
    source: str


# Row "total": avg_run_time_gpu, med_run_time_gpu, avg_gpu_num; {complete,cancel,fail}_gpu_time
# over gpu_job_num, and over gpu_num in 183 days.
_GPU_S = 39_994_296_320 + 30_715_109_125 + 7_288_334_702
HELIOS = Marginals(
    6651.681,
    206.0,
    3.716,
    _GPU_S / 1_580_464,
    _GPU_S / (6_220 * 183 * DAY_S),
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
        spread = mean(lambda k: exp(longer * k + sigma**2 / 2), ratio)
        return log(to.mean_s / spread)

    def sigma_for(longer: float) -> float:
        def over(sigma: float) -> float:
            mu = given(longer, sigma)
            below = mean(lambda k: NormalDist(mu + longer * k, sigma).cdf(log(to.median_s)), ratio)
            return below - 0.5

        return bisect(over, 0.5, 4.0)

    def gpu_time(longer: float) -> float:
        sigma = sigma_for(longer)
        mu = given(longer, sigma)
        whole = mean(lambda k: 2.0**k * exp(mu + longer * k + sigma**2 / 2), ratio)
        return whole - to.gpu_s

    longer = bisect(gpu_time, 0.0, 1.5)
    sigma = sigma_for(longer)
    return Fit(ratio, given(longer, sigma), sigma, longer)


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


def submitted(
    seed: int, count: int, nodes: int, load: float, widest: float, days: int = 1
) -> list[SubmittedWork]:
    """``count`` jobs of each day, and first those of the days before that still run at midnight:
    ``before-``.

    All times are stretched alike until what they would use of these days, if none had to wait, is
    ``load`` of what the nodes have.
    """
    fit, rng = fitted(HELIOS), random.Random(f"sharing day {seed}")
    jobs = drawn(fit, rng, count, 0.0, nodes)
    for index in range(1, int(LONGEST_S / DAY_S) + 1):
        jobs += drawn(fit, rng, count, -index * DAY_S, nodes)
    for index in range(1, days):
        jobs += drawn(fit, rng, count, index * DAY_S, nodes)
    end_s = days * DAY_S

    def used(stretch: float) -> float:
        return sum(
            width * max(0.0, min(end_s, at_s + stretch * long_s) - max(0.0, at_s))
            for at_s, width, long_s, _ in jobs
        )

    stretch = bisect(lambda by: used(by) - load * nodes * end_s, 0.05, 50.0)
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
