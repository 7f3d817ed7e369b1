"""Ray Tune: a sweep whose trials are elastic jobs, of which one loses a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback
from trial import job

from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.cluster import LocalCluster
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.observe.run_reader import RunReader

pytestmark = pytest.mark.timeout(600)
RATES, STEPS = (0.001, 0.01), 8


def train_loop() -> None:
    import ray.train

    import elastic_ft

    for step in elastic_ft.train():
        ray.train.report({"step": step.number, "loss": step.loss})


def trial(config: dict[str, Any]) -> None:
    """In a process of Tune's: it starts the job, and tells Tune what the job reports."""
    name, rate = f"rate-{config['rate']}", {"lr": config["rate"], "schedule": "constant"}
    is_hit = config["rate"] == RATES[0]
    values = job(name, steps=STEPS, optimizer=rate, elastic={"gather_s": 120})
    ElasticTrainer(
        train_loop,
        job=values,
        scaling_config=ScalingConfig(
            num_workers=(1, 2 if is_hit else 1),
            resources_per_worker={"CPU": 0.5},  # beside a trial's process: nodes have one
        ),
        run_config=RunConfig(
            name=name, storage_path=config["folder"], callbacks=[TuneReportCallback()]
        ),
        faults=[PointFault("backward", rank=1, step=4)] if is_hit else (),
    ).fit()


def test_a_sweep_of_two_elastic_jobs(cluster: LocalCluster, tmp_path: Path) -> None:
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.5}),
        param_space={"rate": tune.grid_search(list(RATES)), "folder": str(tmp_path)},
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path)),
    )
    results = tuner.fit()
    assert not results.errors
    for found in results:
        run = RunReader(tmp_path / f"rate-{found.config['rate']}")
        steps = run.steps()
        assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
        assert found.metrics["loss"] == pytest.approx(steps[-1]["loss"])
        lost = [line for line in run.events() if line["event"] == "worker_lost"]
        assert bool(lost) == (found.config["rate"] == RATES[0])
    losses = {found.config["rate"]: found.metrics["loss"] for found in results}
    assert len(set(losses.values())) == 2  # each trial has trained by its own
    assert results.get_best_result("loss", "min").config["rate"] == min(losses, key=losses.get)
