"""A small day: the trace's marginals are met, and what is claimed of the large one is seen."""

from __future__ import annotations

import pytest

from benchmarks.sharing_day import HELIOS, day, fitted, one_day, ratios
from elastic_ft.sim.shared_cluster import Times

NODES, JOBS = 64, 120


def test_the_fit_has_the_traces_marginals() -> None:
    fit = fitted(HELIOS)
    weights = fit.weights()
    gpus = sum(w * 2.0**k for k, w in enumerate(weights)) / sum(weights)
    assert gpus == pytest.approx(HELIOS.mean_gpus, rel=1e-6)
    assert weights[0] / sum(weights) > 0.5  # most have one GPU: so has the median


def test_a_day_has_its_jobs_and_those_of_the_night() -> None:
    jobs = day(1, JOBS, NODES, 1.0, 4.0)
    before = [job for job in jobs if job.job.startswith("before-")]
    assert len(jobs) - len(before) == JOBS and before
    assert all(job.wish.least <= job.wish.most for job in jobs)


def test_urgent_jobs_do_not_wait_and_nobody_is_killed() -> None:
    found = one_day(1, JOBS, NODES, 1.0, Times(), 1800.0, 4.0)
    wait, goodput = ratios(found)
    print(found)
    assert wait > 20 and goodput > 1
    assert found["elastic_ft"]["killed"] == 0 < found["elastic_ft"]["resized"]
