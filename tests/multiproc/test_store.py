"""A job whose object store goes away and comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import s3_server
from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.lines import parse_lines
from elastic_ft.storage.store import Store, open_store
from tests.multiproc.harness import PACED, Gate, make_job, on_disk, run_job
from tests.waiting import until

SHARD = ".bin"
STEPS_BEFORE = 6  # the last of them with a checkpoint
STEPS_OUT = 12  # committed at least while the bucket is gone
AGE = "elastic_ft_checkpoint_age_seconds"
WAIT_S = 150.0  # a controller imports torch, and so does who forks workers


class Outage:
    """Takes the bucket away after a checkpoint, until STEPS_OUT steps have gone without one."""

    def __init__(self, proxy: ObjectStoreProxy) -> None:
        self.proxy = proxy
        self.began = self.healed = self.newest = 0  # steps
        self.ages: list[float] = []  # of the newest checkpoint, after each step in the outage
        self.age_after = 0.0

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        step, checkpoints = line["step"], controller.state.checkpoints
        newest = checkpoints[0].step if checkpoints else 0
        if not self.began:
            if newest >= STEPS_BEFORE:
                self.began = step
                self.proxy.set(StoreFault("no_bucket"))
        elif not self.healed:
            if newest > self.newest:  # it was all there already
                self.newest, self.ages = newest, []
            self.ages.append(age(controller))
            if len(self.ages) > STEPS_OUT and self.proxy.fired["no_bucket"]:
                self.healed = step
                self.proxy.set()
        elif newest > self.healed:
            self.age_after = age(controller)
            controller.stop("a checkpoint was committed after the outage")


def age(controller: Controller) -> float:
    found = controller.metrics.registry.get_sample_value(AGE, {"job_name": controller.job.name})
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_replicas_read_a_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        job = make_job(strategy, steps=3, checkpoint={"url": s3.url("checkpoints")})
        first = run_job(job, tmp_path / "run")
        (committed,) = first.all("checkpoint_committed")
        proxy.downloaded.clear()
        (tmp_path / "run" / "result.json").unlink()  # else it is complete, and nothing is started
        again = run_job(job, tmp_path / "run")
    assert again.result["status"] == "completed", again.story()
    assert again.all("generation_formed")[-1]["source"] == "checkpoint", again.story()
    assert again.result["state_digest"] == first.result["state_digest"]
    read = {path: n for path, n in proxy.downloaded.items() if path.endswith(SHARD)}
    assert sum(read.values()) == committed["bytes"], read


def test_training_goes_on_while_the_bucket_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        checkpoint = {"url": s3.url("checkpoints"), "every_steps": 3}
        job = make_job("fsdp", steps=4000, workers=2, data=PACED, checkpoint=checkpoint)
        outage = Outage(proxy)
        run = run_job(job, tmp_path / "run", on_step=outage)
    assert run.result["status"] == "stopped", run.story()
    assert "after the outage" in run.result["reason"], run.story()
    assert run.worlds() == [2], run.story()
    steps = [line["step"] for line in run.steps]
    assert steps == list(range(1, len(steps) + 1)), run.story()

    lost = [*run.all("checkpoint_abandoned"), *run.all("checkpoint_failed")]
    assert lost, run.story()
    assert any("NoSuchBucket" in line["reason"] for line in lost), run.story()
    committed = [line["step"] for line in run.all("checkpoint_committed")]
    assert [s for s in committed if s <= outage.began], run.story()
    assert [s for s in committed if s > outage.healed], run.story()
    assert outage.ages == sorted(outage.ages), "it rises by itself"
    assert outage.ages[-1] > outage.ages[0]
    assert outage.age_after < outage.ages[-1]


class LoseNode:
    """Once the world is whole again after the first loss, the node of its last rank is lost."""

    def __init__(self) -> None:
        self.lost = ""

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        assignment = controller.state.assignment
        assert assignment is not None and isinstance(controller.host, LocalHost)
        if line["generation"] > 2 and len(assignment.members) == 3 and not self.lost:
            self.lost = assignment.members[-1].node
            controller.host.kill_node(self.lost)


def test_a_stopped_worker_and_a_lost_node_cost_no_step_where_all_is_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's rows, one after the other. A spare node takes the place of the lost one."""
    gate, losing = Gate(tmp_path / "gate"), LoseNode()
    stop = PointFault("forward", "stop", rank=1, step=4)
    with s3_server(tmp_path / "s3") as s3:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        job = gate.job(
            "fsdp",
            steps=60,
            workers=3,
            checkpoint={"url": s3.url("checkpoints"), "every_steps": 4},
            elastic={"heartbeat_timeout_s": 4.0},
        )
        run = run_job(
            job,
            tmp_path / "run",
            nodes={f"n{i}": 1 for i in range(4)},
            faults=[stop],
            on_step=losing,
            watch=gate,
            folder_url=s3.url("run"),
        ).check()
    assert losing.lost, run.story()
    lost = [line for line in run.recoveries if line["world_after"] < line["world_before"]]
    assert [line["cause"] for line in lost] in (
        ["worker_hung", "node_lost"],
        ["worker_hung", "worker_lost"],  # of its processes' ends, whichever is first
    ), run.story()
    assert [line["steps_lost"] for line in lost] == [0, 0], run.story()
    assert all(line["survivors_kept_pid"] for line in lost), run.story()
    assert [line["node"] for line in run.all("node_lost")] == [losing.lost], run.story()
    assert run.all("checkpoint_committed"), run.story()


@pytest.mark.timeout(500)  # four controllers start
def test_controllers_are_killed_and_stopped_where_all_is_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is killed; the second too, as soon as it has published what keepers had saved; the
    third is stopped, and wakes up when the fourth trains. No committed step is lost, none is twice.
    """
    with s3_server(tmp_path / "s3") as s3, ExitStack() as started:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(s3.url("run"))
        paced = {"path": "chaos.jobs:Paced", "kwargs": {"pause_s": 0.05}}  # the mirror lags by 4 s
        checkpoint = {"every_steps": 4000}
        waiting = {"controller_timeout_s": 2.0}  # for a controller's successor
        job = make_job(
            "fsdp", steps=4000, workers=2, data=paced, checkpoint=checkpoint, elastic=waiting
        )
        job_file = tmp_path / "job.yaml"
        job_file.write_text(yaml.safe_dump(job.model_dump(mode="json")))

        def start() -> subprocess.Popen[str]:
            command = [
                sys.executable,
                "-m",
                "elastic_ft",
                "run",
                str(job_file),
                "--processes",
                "--foreground",  # whose process is the controller
            ]
            child = subprocess.Popen(
                [*command, "--out", s3.url("run")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.callback(ended, child)
            return child

        def recorded() -> int:
            return max((line["step"] for line in lines(store, "steps.jsonl")), default=0)

        first = start()
        until(lambda: recorded() >= 20, "some steps")
        ended(first)
        second = start()
        until(lambda: events(store, "emergency_checkpoint"), "what the keepers saved")
        ended(second)
        third, before = start(), recorded()
        until(lambda: recorded() >= before + 20, "the third to train")
        third.send_signal(signal.SIGSTOP)
        stopped_at = recorded()
        fourth = start()
        until(lambda: recorded() >= stopped_at + 20, "the fourth to train")
        third.send_signal(signal.SIGCONT)
        _, said = third.communicate(timeout=WAIT_S)
        fourth.send_signal(signal.SIGINT)
        _, story = fourth.communicate(timeout=WAIT_S)
        for name in ("events.jsonl", "steps.jsonl", "ledger.jsonl", "result.json"):
            (tmp_path / name).write_bytes(store.get(name))
    assert third.returncode == 1 and "superseded by run" in said, said
    assert fourth.returncode == 130, story
    run = on_disk(job, tmp_path).check("stopped")
    restarted = run.all("controller_restarted")
    assert [line["steps_lost"] for line in restarted] == [0] * len(restarted), run.story()
    assert restarted[0]["step"] >= 20, run.story()
    assert restarted[-1]["step"] >= stopped_at, run.story()
    assert len(run.all("emergency_checkpoint")) >= 2, run.story()


def ended(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(10)


def events(store: Store, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(store, "events.jsonl") if line["event"] == name]


def lines(store: Store, name: str) -> list[dict[str, Any]]:
    return parse_lines(store.get(name), name) if store.exists(name) else []
