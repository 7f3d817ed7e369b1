"""A job whose workers all restart while its store can't be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.object_store_proxy import FaultKind, ObjectStoreProxy, StoreFault
from chaos.s3_server import s3_server
from elastic_ft.controller.controller import Controller
from tests.multiproc.harness import PACED, make_job, run_job

CHECKPOINTS_BEFORE = 2  # as many as are kept
TRIES = 3  # to read, each with all the client's own; then the store is well again
STEPS_AFTER = 3


class Outage:
    """Reads fail, and all workers are killed, once there are checkpoints. No keeper survives."""

    def __init__(self, proxy: ObjectStoreProxy, kind: FaultKind) -> None:
        self.proxy, self.fault = proxy, StoreFault(kind, methods=("GET",), path=r"\.(bin|json)")
        self.began = self.healed = False
        self.resumed_at = 0

    def on_step(self, controller: Controller, line: dict[str, Any]) -> None:
        if not self.began and len(controller.state.checkpoints) == CHECKPOINTS_BEFORE:
            self.began = True
            self.proxy.set(self.fault)
            for worker in controller.state.ready:
                controller.host.kill_worker(worker)
        elif self.healed and line["step"] >= self.resumed_at + STEPS_AFTER:
            controller.stop("it goes on")

    def watch(self, controller: Controller) -> None:
        outage = controller.state.outage
        if not self.healed and outage is not None and outage.tries >= TRIES:
            self.proxy.set()
            self.healed = True
            self.resumed_at = controller.state.committed


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "busy"), ("fsdp", "stall")])
def test_it_resumes_at_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: FaultKind
) -> None:
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        checkpoint = {"url": s3.url("checkpoints"), "every_steps": 3, "keep_last": 2}
        elastic = {"form_timeout_s": 6.0 if kind == "stall" else 60.0, "heartbeat_timeout_s": 10.0}
        sections = {"data": PACED, "checkpoint": checkpoint, "elastic": elastic}
        job = make_job(strategy, steps=4000, workers=2, **sections)
        outage = Outage(proxy, kind)
        run = run_job(
            job,
            tmp_path / "run",
            on_step=outage.on_step,
            watch=outage.watch,
            keepers=False,
        )
    assert run.result["status"] == "stopped", run.story()
    assert "it goes on" in run.result["reason"], run.story()
    assert len(run.all("source_unreadable")) >= TRIES, run.story()
    (suspended,) = [line for line in run.all("suspended") if "store" in line["reason"]]
    assert "the store can't be read" in suspended["reason"], run.story()
    assert not run.all("checkpoint_refused"), run.story()
    (killed,) = run.all("diagnosis")  # no line for each time that the store is tried
    assert killed["seq"] < suspended["seq"], run.story()
    _, resumed = run.all("generation_formed")
    newest = max(
        line["step"] for line in run.all("checkpoint_committed") if line["seq"] < resumed["seq"]
    )
    assert (resumed["source"], resumed["step"]) == ("checkpoint", newest), run.story()
    steps = [line["step"] for line in run.steps]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > newest, run.story()
