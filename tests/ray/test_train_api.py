"""What a user of Ray Train sees: train loops, reports, callbacks, results, errors, state."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import Checkpoint, TrainingFailedError, UserCallback
from ray.train.v2._internal.state.state_actor import get_state_actor
from trial import SOON_S, START_S, Trial, job

from elastic_ft.config import parse_job
from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.faults import PointFault
from elastic_ft.hosts.interrupts import stopping
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import ROOT, actor_named, actors_of
from elastic_ft.hosts.ray.trainer import (
    ElasticTrainer,
    check_gpus,
    default_scaling,
    on_gpus,
    with_workers_of,
)

Start = Callable[..., Trial]
pytestmark = pytest.mark.timeout(600)
TWO = {"min_workers": 1, "max_workers": 2, "gather_s": 60}


class Recorder(UserCallback):
    """Writes what it is told, in the controller, to a file. Blocks while there is a file ``hold``
    beside it, which it calls ``held``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            held = self.path.with_name("hold").rename(self.path.with_name("held"))
            wait_for(lambda: not held.exists(), START_S, "the callback may go on")
        line = {"metrics": metrics, "checkpoint": checkpoint.path if checkpoint else None}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def reporting_loop(config: dict[str, Any]) -> str:
    """Reports every step; rank 0 adds a checkpoint every ``checkpoint_every`` steps."""
    import ray.train.collective

    import elastic_ft

    context = ray.train.get_context()
    for step in elastic_ft.train():
        checkpoint = None
        if step.number % config["checkpoint_every"] == 0 and step.rank == 0:
            folder = tempfile.mkdtemp()
            (Path(folder) / "step.txt").write_text(str(step.number))
            checkpoint = Checkpoint.from_directory(folder)
        rank, size = context.get_world_rank(), context.get_world_size()
        assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        agreed = ray.train.collective.broadcast_from_rank_zero({"step": step.number, "from": rank})
        assert agreed["step"] == step.number
        metrics = {"step": step.number, "rank": rank, "world_size": size}
        ray.train.report(metrics, checkpoint=checkpoint)
    return "came to the end"


@pytest.mark.parametrize(
    "strategy, points",
    [
        ("ddp", ("after_optimizer", "reduce")),
        ("fsdp", ("snapshot_copy", "buddy_send")),  # applied and reported, but not committed
    ],
)
def test_every_step_is_reported_once_whatever_is_lost(
    start: Start, tmp_path: Path, strategy: str, points: tuple[str, str]
) -> None:
    recorder = Recorder(tmp_path / "reports.jsonl")
    values = job(f"reports-{strategy}", parallel={"strategy": strategy})
    trial = start(
        values,
        reporting_loop,
        train_loop_config={"checkpoint_every": 10},
        callbacks=[recorder],
        faults=[
            PointFault(points[0], "kill", rank=0, step=10),  # the one that writes checkpoints
            PointFault(points[1], "kill", rank=1, step=25),
        ],
    )
    trial.wait("both faults", lambda: len(trial.events("fault_fired")) == 2, 2 * START_S)
    trial.wait_for_world(4, steps=11, timeout_s=START_S)
    result = trial.stop()
    trial.check()
    reports = recorder.read()
    assert [r["metrics"][0]["step"] for r in reports] == list(range(1, trial.step + 1))
    for line in reports:
        ranks = [metrics["rank"] for metrics in line["metrics"]]
        assert ranks == sorted(set(ranks))  # in rank order; of those that lived to tell
    registered = [r["checkpoint"] for r in reports if r["checkpoint"]]
    assert result.checkpoint is not None
    assert result.checkpoint.path == registered[-1]
    step = int((Path(result.checkpoint.path) / "step.txt").read_text())
    assert step % 10 == 0
    assert step > trial.step - 10
    assert result.return_value == "came to the end"


def test_reports_go_on_with_the_next_controller(
    start: Start, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Each step's is delivered once; who waits in a collective as the controller dies waits on."""
    recorder = Recorder(tmp_path / "reports.jsonl")
    values = job("reports-go-on", elastic=TWO, parallel={"strategy": "fsdp"})
    config = {"checkpoint_every": 10}
    trial = start(values, reporting_loop, train_loop_config=config, callbacks=[recorder])
    trial.wait_for_world(2, timeout_s=START_S)
    pids = trial.pids()
    os.kill(cluster.controller_pid(), signal.SIGKILL)
    trial.wait("the next controller", lambda: bool(trial.events("in_charge")), START_S)
    trial.wait_for_world(2, steps=11, timeout_s=START_S)
    assert trial.pids() == pids and len(trial.events("generation_formed")) == 1
    check_it_answers_while_a_callback_blocks(trial, tmp_path)
    result = trial.stop()
    trial.check()
    reports = recorder.read()
    assert [r["metrics"][0]["step"] for r in reports] == list(range(1, trial.step + 1))
    assert all([metrics["rank"] for metrics in r["metrics"]] == [0, 1] for r in reports)
    registered = [r["checkpoint"] for r in reports if r["checkpoint"]]
    assert result.checkpoint is not None and result.checkpoint.path == registered[-1]
    assert result.return_value == "came to the end"


def check_it_answers_while_a_callback_blocks(trial: Trial, folder: Path) -> None:
    (folder / "hold").touch()
    trial.wait("the callback blocks", (folder / "held").exists, SOON_S)
    (name,) = (name for name in actors_of(ROOT) if name.endswith("/controller"))
    controller: Any = actor_named(name)
    try:
        assert ray.get(controller.process.remote(), timeout=SOON_S)
        assert (folder / "held").exists()
    finally:
        (folder / "held").unlink()


def test_dashboard_state_follows_the_members(
    start: Start, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    trial = start(job("state", elastic=TWO))
    trial.wait_for_world(2, timeout_s=START_S)

    def shown() -> set[int]:
        runs = ray.get(get_state_actor().get_train_runs.remote())
        [run] = [r for r in runs.values() if r.name == "state"]
        attempts = ray.get(get_state_actor().get_train_run_attempts.remote())[run.id]
        [attempt] = attempts.values()
        return {worker.pid for worker in attempt.workers}

    trial.wait("the first members are shown", lambda: shown() == trial.pids(), SOON_S)
    os.kill(trial.members()[0]["pid"], signal.SIGKILL)
    trial.wait_for_world(2, timeout_s=START_S)
    trial.wait("the new members are shown", lambda: shown() == trial.pids(), SOON_S)
    trial.stop()
    runs = ray.get(get_state_actor().get_train_runs.remote())
    assert [r.status.value for r in runs.values() if r.name == "state"] == ["FINISHED"]


def test_an_error_of_the_train_loop_ends_the_job_after_its_retries(start: Start) -> None:
    def loop() -> None:
        import elastic_ft

        for step in elastic_ft.train():
            if step.number >= 3:
                raise ValueError("no good")

    values = job("raises", elastic=TWO | {"max_user_failures": 1})
    trial = start(values, loop)
    with pytest.raises(pytest.fail.Exception):
        trial.join(START_S)
    assert isinstance(trial.error, TrainingFailedError)
    assert "no good" in str(trial.error)
    result = json.loads((trial.folder / "result.json").read_text())
    assert result["status"] == "failed"


def test_a_job_without_enough_workers_fails(start: Start) -> None:
    trial = start(job("few", elastic={"min_workers": 4, "max_workers": 4, "start_timeout_s": 0.2}))
    with pytest.raises(pytest.fail.Exception):
        trial.join(SOON_S)
    assert isinstance(trial.error, JobFailed)
    assert isinstance(trial.error, TrainingFailedError)
    assert "min_workers is 4" in str(trial.error)


def check_startup(startup: dict[str, Any], trial: Trial) -> None:
    """What Python and Ray need to be there, before any of our code, is no part of ``imports_s``."""
    worker, inbox = startup.pop("worker"), trial.lines("inbox.jsonl")
    (ready,) = [
        line
        for line in inbox
        if line["type"] == "WorkerReady" and line["member"]["worker"] == worker
    ]
    lived_s = ready["told_at_s"] - ready["started_at_s"]
    assert 0 < sum(ready["spent"].values()) < lived_s - 0.1, (startup, ready)
    # 0: Ray had the process ready before it was asked for one.
    assert startup["process_s"] == 0 or startup["process_s"] > 0.1, startup
    first, whole_s = trial.lines("steps.jsonl")[0], sum(startup.values())
    told_s = first["committed_at_s"] - inbox[0]["at_s"]  # since the job's start was told of
    assert whole_s - startup["asked_s"] - 0.5 < told_s < whole_s + 0.5


def test_a_completed_job(start: Start) -> None:
    trial = start(job("short", steps=6, elastic=TWO))
    result = trial.join(START_S)
    assert result.error is None
    assert (result.status, result.reason) == ("completed", "all 6 steps are committed")
    assert result.metrics is not None
    assert result.metrics["step"] == 6
    ended = json.loads((trial.folder / "result.json").read_text())
    assert ended["status"] == "completed"
    check_startup(ended["startup"], trial)
    trial.check()
    before = (trial.folder / "result.json").read_bytes()
    again = start(job("short", steps=6, elastic=TWO)).join(SOON_S)
    assert (again.status, (trial.folder / "result.json").read_bytes()) == ("completed", before)
    assert len(trial.events("job_started")) == 1, "nothing was started"


def test_a_third_interrupt_ends_a_driver_whose_controller_is_stuck() -> None:
    class Stuck:
        def __init__(self) -> None:
            self.asked: list[str] = []
            self.stop = self

        def remote(self, reason: str) -> None:
            self.asked.append(reason)

    trainer, stuck = ElasticTrainer(job("stuck"), scaling_config=two_workers()), Stuck()
    trainer._controller = stuck
    with stopping(lambda: trainer.stop("interrupted")):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stuck.asked == ["interrupted", "interrupted"]


def two_workers() -> Any:
    from ray.train import ScalingConfig

    return ScalingConfig(num_workers=2)


@pytest.mark.parametrize(
    ("gpus", "parallel", "use_gpu"),
    [
        (0, {}, False),
        (8, {}, True),
        (8, {"backend": "gloo"}, False),
        (8, {"device": "cpu"}, False),
        (0, {"device": "cuda", "backend": "gloo"}, True),  # Ray waits for a node that has them
        (0, {"backend": "nccl"}, True),
    ],
)
def test_workers_get_gpus_where_job_or_cluster_says_so(
    monkeypatch: pytest.MonkeyPatch, gpus: int, parallel: dict[str, str], use_gpu: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": gpus})
    wanted = parse_job(job("scaled") | {"parallel": parallel})
    scaling = default_scaling(wanted)
    assert scaling.use_gpu == use_gpu
    assert on_gpus(wanted).parallel.wants_gpu or not use_gpu
    if wanted.parallel.wants_gpu:
        with pytest.raises(ConfigError, match=r"parallel\.device: .*use_gpu=True"):
            check_gpus(wanted, two_workers())


def test_scaling_config_overrides_the_numbers_of_workers() -> None:
    from ray.train import ScalingConfig

    trainer = ElasticTrainer(job("scaled"), scaling_config=ScalingConfig(num_workers=(2, 3)))
    assert (trainer.job.elastic.min_workers, trainer.job.elastic.max_workers) == (2, 3)
    fixed = with_workers_of(trainer.job, ScalingConfig(num_workers=2))
    assert (fixed.elastic.min_workers, fixed.elastic.max_workers) == (2, 2)
    with pytest.raises(ConfigError, match="micro-batches"):
        ElasticTrainer(job("scaled"), scaling_config=ScalingConfig(num_workers=(2, 30)))
