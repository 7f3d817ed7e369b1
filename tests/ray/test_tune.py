"""Ray Tune: a sweep whose trials are elastic jobs. One loses a worker, one is ended by its
scheduler, of one the process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue as queues
import signal
import subprocess
import sys
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
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)
from ray.util.queue import Full
from trial import SOON_S, START_S, job

from elastic_ft.errors import JobFailed
from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import RunNames, actors_of, groups_of
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.hosts.ray.tune_trial import (
    SILENT_LOOKS,
    TRIAL_OVER,
    TRIAL_SILENT,
    TrialReports,
    TuneTrial,
    pausing_scheduler,
)
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


def check_it_has_ended(folder: Path, why: str = TRIAL_OVER, within_s: float = SOON_S) -> None:
    """With a checkpoint of all its steps, and nothing of it is left on the cluster."""
    prefix = RunNames(folder.name, str(folder)).prefix
    nothing_left = lambda: not (actors_of(prefix) or groups_of(prefix))  # noqa: E731
    wait_for(nothing_left, within_s, f"{folder.name}: nothing is left")
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "stopped"
    assert result["reason"].startswith(why)
    assert result["checkpoints"][-1]["step"] == RunReader(folder).steps()[-1]["step"]


@contextlib.contextmanager
def sweep(cluster: LocalCluster, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("sweep_driver.py")
    command = [sys.executable, str(script), cluster.address, str(folder), *arguments]
    with (folder / "driver.err").open("w") as errors:
        driver = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield driver
    finally:
        driver.kill()
        driver.communicate()
        print((folder / "driver.err").read_text()[-3000:])


@pytest.mark.soak
def test_a_sweep_that_pauses_trials_starts_none_of_its_jobs(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with sweep(cluster, tmp_path, "pbt", "0.1", "0.2") as driver:
        out, _ = driver.communicate(timeout=SOON_S)
    errors = json.loads(out.splitlines()[-1])
    assert len(errors) == 2
    assert all("Ray Tune's PopulationBasedTraining pauses trials" in error for error in errors)
    assert not list(tmp_path.glob("rate-*"))


@pytest.mark.soak
def test_a_stopped_trial_ends_its_job_and_so_does_a_killed_driver(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    stopped, other = "0.2", "0.3"
    with sweep(cluster, tmp_path, "plain", stopped, other) as driver:
        pids = [tmp_path / f"pid-{rate}" for rate in (stopped, other)]
        wait_for(lambda: all(pid.exists() for pid in pids), START_S, "results of both")
        os.kill(pid := int(pids[0].read_text()), signal.SIGSTOP)
        try:
            check_it_has_ended(tmp_path / f"rate-{stopped}", TRIAL_SILENT, 2 * SOON_S)
            assert not (tmp_path / f"rate-{other}/result.json").exists()
            driver.kill()
            check_it_has_ended(tmp_path / f"rate-{other}", TRIAL_OVER)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
    reasons = queues.Queue[str]()
    there.watch(reasons.put)
    of_reports._trial.end()
    assert reasons.get(timeout=SOON_S) == TRIAL_OVER
    assert there.is_over and not trial.is_over


def test_a_trial_that_is_stopped_is_over_once_it_was_silent_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its actor is not gone, and its reports waited for ever."""
    looks, reasons = iter(range(1000)), queues.Queue[str]()
    trial = TuneTrial("of an actor")

    def look(actor: str) -> bool:
        number = next(looks)
        if number == SILENT_LOOKS - 1:
            trial.hear(is_over=False)
        if number == SILENT_LOOKS:
            raise GetTimeoutError("the head is away: that is no silence of the trial's")
        return False

    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.LOOK_S", 1e-4)
    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.actor_is_gone", look)
    trial.watch(reasons.put)
    assert reasons.get(timeout=SOON_S) == TRIAL_SILENT
    assert trial.is_over and next(looks) == 2 * SILENT_LOOKS + 1


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [
        (PopulationBasedTraining(hyperparam_mutations={"rate": [1.0]}), "PopulationBasedTraining"),
        (HyperBandScheduler(), "HyperBandScheduler"),
        (HyperBandForBOHB(), "HyperBandForBOHB"),
        (ResourceChangingScheduler(), "ResourceChangingScheduler"),
        (ASHAScheduler(), None),
        (MedianStoppingRule(), None),
        (None, None),
    ],
)
def test_a_scheduler_that_pauses_trials_is_seen(
    tmp_path: Path, scheduler: Any, found: str | None
) -> None:
    """In what a Tuner writes before its trials start."""
    config = tune.TuneConfig(metric="score", mode="max", scheduler=scheduler)
    run = tune.RunConfig(name="sweep", storage_path=str(tmp_path))
    tune.Tuner(trial, tune_config=config, run_config=run)
    assert pausing_scheduler((tmp_path / "sweep/tuner.pkl").read_bytes()) == found
    assert pausing_scheduler(b"") is None


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


def test_reports_that_tune_does_not_take_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tune's head may be away for good: the trial stood there, and so did training."""
    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.LOOK_S", 1e-3)
    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.TAKEN_S", 0.05, raising=False)
    looks = iter([False] * 1000)
    queue = SimpleNamespace(actor=SimpleNamespace(empty=SimpleNamespace(remote=lambda: "asked")))
    monkeypatch.setattr("elastic_ft.hosts.ray.tune_trial.reports_waiting", lambda: queue)
    monkeypatch.setattr("ray.get", lambda answer, timeout: next(looks))
    TuneTrial("of no actor", threading.Event()).wait_for_reports()
    assert "has not taken the last report" in caplog.text
    full = Queue(*[Full() for _ in range(1_000_000)])
    with pytest.raises(JobFailed, match="has taken no report for"):
        TrialReports(full, TuneTrial("of no actor")).put("it")  # type: ignore[arg-type]


def test_who_waits_for_the_job_leaves_a_trial_that_tune_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its process goes on (``reuse_actors``), the controller is told."""
    stopped, told = threading.Event(), list[str]()
    waits: Iterator[list[str]] = iter([[], ["the answer"], []])

    def wait(answers: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return next(waits), []

    said = lambda is_over: told.append("over" if is_over else "here")  # noqa: E731
    controller = SimpleNamespace(hear_trial=SimpleNamespace(remote=said))
    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", lambda answer, timeout: answer)
    trial = TuneTrial("of no actor", stopped)
    trial.wait_for("the answer", controller)
    assert told == ["here"], "it is not stopped: so says it"
    told.clear()
    stopped.set()
    with pytest.raises(SystemExit) as left:
        trial.wait_for("the answer", controller)
    assert left.value.code == 0 and told == ["over"]
