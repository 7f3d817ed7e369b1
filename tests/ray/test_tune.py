"""Ray Tune: a sweep whose trials are elastic jobs. One loses a worker, one is ended by its
scheduler, of one the process is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.util.queue import Full
from trial import SOON_S, START_S, job

from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import RunNames, actors_of, groups_of
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.hosts.ray.tune_trial import TRIAL_OVER, TrialReports, TuneTrial
from elastic_ft.observe.run_reader import RunReader

pytestmark = pytest.mark.timeout(600)
KEPT, STOPPED, KILLED = RATES = (0.001, 0.01, 0.1)
STEPS = 8


def train_loop(config: dict[str, Any]) -> None:
    """The scheduler goes by ``score``. It has a score before the one comes that is worse; and the
    trial that is kept sees the others end before its third step."""
    import ray.train

    import elastic_ft

    rate, folder = config["rate"], Path(config["folder"])
    for step in elastic_ft.train():
        if rate == STOPPED:
            wait_for((folder / f"seen-{KEPT}").exists, START_S, "a result that is better")
        if rate == KEPT and step.number == 2:
            for other in (STOPPED, KILLED):
                wait_for((folder / f"ended-{other}").exists, START_S, f"the end of {other}")
        ray.train.report({"step": step.number, "loss": step.loss, "score": int(rate == STOPPED)})


def trial(config: dict[str, Any]) -> None:
    """In a process of Tune's: it starts the job, and tells Tune what the job reports."""
    name, rate = f"rate-{config['rate']}", {"lr": config["rate"], "schedule": "constant"}
    is_hit = config["rate"] == KEPT
    values = job(name, optimizer=rate, elastic={"gather_s": 120})
    ElasticTrainer(
        train_loop,
        job=values | ({"steps": STEPS} if is_hit else {}),  # the others never come to an end
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=(1, 2 if is_hit else 1),
            resources_per_worker={"CPU": 0.5},  # beside a trial's process: nodes have one
        ),
        run_config=RunConfig(
            name=name, storage_path=config["folder"], callbacks=[TuneReportCallback()]
        ),
        faults=[PointFault("backward", rank=1, step=4)] if is_hit else (),
    ).fit()


class Told(tune.Callback):
    """Of results that the scheduler has had. One trial's process is killed with its first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any) -> None:
        rate = trial.config["rate"]
        (self.folder / f"seen-{rate}").touch()
        if rate == KILLED:
            os.kill(result["pid"], signal.SIGKILL)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        (self.folder / f"ended-{trial.config['rate']}").touch()

    on_trial_error = on_trial_complete


def test_a_sweep_of_elastic_jobs(cluster: LocalCluster, tmp_path: Path) -> None:
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.5}),
        param_space={"rate": tune.grid_search(list(RATES)), "folder": str(tmp_path)},
        tune_config=tune.TuneConfig(
            metric="score", mode="min", scheduler=ASHAScheduler(max_t=1000, reduction_factor=2)
        ),
        run_config=tune.RunConfig(
            name="sweep", storage_path=str(tmp_path), callbacks=[Told(tmp_path)]
        ),
    )
    results = {found.config["rate"]: found for found in tuner.fit()}
    told = {rate: list(found.metrics_dataframe["step"]) for rate, found in results.items()}
    assert told == {KEPT: [*range(1, STEPS + 1)], STOPPED: [1], KILLED: [1]}
    assert {rate: found.error is None for rate, found in results.items()} == {
        KEPT: True,
        STOPPED: True,
        KILLED: False,
    }
    check_the_one_that_was_kept(tmp_path / f"rate-{KEPT}", results[KEPT].metrics["loss"])
    for rate in (STOPPED, KILLED):
        check_it_has_ended(tmp_path / f"rate-{rate}")


def check_the_one_that_was_kept(folder: Path, loss: float) -> None:
    run = RunReader(folder)
    steps = run.steps()
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    assert loss == pytest.approx(steps[-1]["loss"])
    assert [line["rank"] for line in run.events() if line["event"] == "worker_lost"] == [1]


def check_it_has_ended(folder: Path) -> None:
    """With a checkpoint of all its steps, and nothing of it is left on the cluster."""
    prefix = RunNames(folder.name, str(folder)).prefix
    nothing_left = lambda: not (actors_of(prefix) or groups_of(prefix))  # noqa: E731
    wait_for(nothing_left, SOON_S, f"{folder.name}: nothing is left")
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "stopped"
    assert result["reason"].startswith(TRIAL_OVER)
    assert result["checkpoints"][-1]["step"] == RunReader(folder).steps()[-1]["step"]


class Queue:
    """Holds what each ``put`` of it does: an exception that it raises, or None."""

    def __init__(self, *puts: Exception | None) -> None:
        self.puts, self.held = iter(puts), list[Any]()

    def put(self, item: Any, timeout: float) -> None:
        if (error := next(self.puts)) is not None:
            raise error
        self.held.append(item)


def test_a_report_waits_for_its_trial_and_for_none_that_is_over() -> None:
    trial = TuneTrial("of no actor")
    queue = Queue(Full(), ActorUnavailableError("away", None), None, ActorDiedError())
    reports = TrialReports(queue, trial)  # type: ignore[arg-type]
    reports.put("first")
    assert queue.held == ["first"] and not trial.is_over
    reports.put("of nobody")
    reports.put("the queue is not asked again")
    assert queue.held == ["first"] and trial.is_over


def test_a_trial_and_its_reports_are_one_where_they_are_unpickled() -> None:
    trial = TuneTrial("of no actor", threading.Event())
    reports = TrialReports(Queue(), trial)  # type: ignore[arg-type]
    there, of_reports = cloudpickle.loads(cloudpickle.dumps((trial, reports)))
    over = threading.Event()
    there.watch(over.set)
    of_reports._trial.end()
    assert over.wait(SOON_S) and there.is_over and not trial.is_over


def test_a_trial_does_not_end_before_tune_has_its_last_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its function's return is the trial's end, whatever waits in the queue then."""
    looks = iter([GetTimeoutError(), False, ActorUnavailableError("away", None), True])

    def get(answer: str, timeout: float) -> bool:
        if isinstance(look := next(looks), Exception):
            raise look
        return look

    queue = SimpleNamespace(actor=SimpleNamespace(empty=SimpleNamespace(remote=lambda: "asked")))
    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.reports_waiting", lambda: queue)
    monkeypatch.setattr("ray.get", get)
    trial = TuneTrial("of no actor", threading.Event())
    trial.wait_for_reports()
    assert next(looks, None) is None


def test_who_waits_for_the_job_leaves_a_trial_that_tune_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its process goes on (``reuse_actors``), the controller is told."""
    stopped, told = threading.Event(), list[str]()
    waits: Iterator[list[str]] = iter([[], ["the answer"], []])

    def wait(answers: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return next(waits), []

    controller = SimpleNamespace(end_with_trial=SimpleNamespace(remote=lambda: told.append("over")))
    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", lambda answer, timeout: answer)
    trial = TuneTrial("of no actor", stopped)
    trial.wait_for("the answer", controller)
    assert not told
    stopped.set()
    with pytest.raises(SystemExit) as left:
        trial.wait_for("the answer", controller)
    assert left.value.code == 0 and told == ["over"]
