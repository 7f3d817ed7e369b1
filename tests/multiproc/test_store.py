"""A job whose object store goes away and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from elastic_ft.runtime.controller import Controller
from tests.multiproc.harness import make_job, run_job
from tests.s3_server import s3_server

SHARD = ".bin"
STEPS_BEFORE = 6  # the last of them with a checkpoint
STEPS_OUT = 12  # committed at least while the bucket is gone
AGE = "elastic_ft_checkpoint_age_seconds"


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
        first = run_job(job, tmp_path / "run", environment=environment)
        (committed,) = first.all("checkpoint_committed")
        proxy.downloaded.clear()
        (tmp_path / "run" / "result.json").unlink()  # else it is complete, and nothing is started
        again = run_job(job, tmp_path / "run", environment=environment)
    assert again.result["status"] == "completed", again.story()
    assert again.all("generation_formed")[-1]["source"] == "checkpoint", again.story()
    assert again.result["state_digest"] == first.result["state_digest"]
    read = {path: n for path, n in proxy.downloaded.items() if path.endswith(SHARD)}
    assert sum(read.values()) == committed["bytes"], read


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_goes_on_while_the_bucket_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        checkpoint = {"url": s3.url("checkpoints"), "every_steps": 3}
        job = make_job(strategy, steps=4000, workers=2, checkpoint=checkpoint)
        outage = Outage(proxy)
        run = run_job(job, tmp_path / "run", on_step=outage, environment=environment)
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
