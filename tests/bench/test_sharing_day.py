"""A small day: the trace's marginals are met, and what is claimed of the large one is seen."""

from __future__ import annotations

import pytest

from benchmarks.gang_queue import WAYS
from benchmarks.shared_cluster import Times
from benchmarks.sharing_day import Setting, one_load, ratios
from benchmarks.sharing_jobs import HELIOS, fitted, submitted

NODES, JOBS = 64, 120


def test_the_fit_has_the_traces_marginals() -> None:
    fit = fitted(HELIOS)
    weights = fit.weights()
    gpus = sum(w * 2.0**k for k, w in enumerate(weights)) / sum(weights)
    assert gpus == pytest.approx(HELIOS.mean_gpus, rel=1e-6)
    assert weights[0] / sum(weights) > 0.5  # most have one GPU: so has the median


def test_a_day_has_its_jobs_and_those_of_the_night() -> None:
    jobs = submitted(1, JOBS, NODES, 1.0, 4.0)
    before = [job for job in jobs if job.job.startswith("before-")]
    assert len(jobs) - len(before) == JOBS and before
    assert all(job.wish.least <= job.wish.most for job in jobs)


def test_urgent_jobs_do_not_wait_and_nobody_is_killed() -> None:
    found = one_load(1, 1.0, Setting(JOBS, NODES), Times())
    ratio = ratios(found)
    print(found)
    assert ratio["wait"] > 20 and 1 < ratio["goodput"] <= ratio["most"]
    assert found["elastic_ft"]["killed"] == 0 < found["elastic_ft"]["resized"]
    for way in (*WAYS, "elastic_ft"):  # each node second is one of these, and none is two
        parts = (found[way][name] for name in ("goodput", "idle", "starting", "again", "width"))
        assert sum(parts) == pytest.approx(1.0, abs=1e-6), way
