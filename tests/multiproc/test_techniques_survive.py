"""What README says of losses holds for every technique: the run folder and the checkpoints are in
an object store; a worker is killed, another is stopped, then all are killed while the store can't
be read, and go on from what it has once it can.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import s3_server
from elastic_ft.controller.controller import Controller
from tests.multiproc.harness import Gate, Run, make_job, run_job
from tests.multiproc.test_averaged_job import SCHEDULE_FREE
from tests.multiproc.test_experts_job import SIZES

STEPS, EVERY_STEPS = 20, 3
AWAY = StoreFault("busy", methods=("GET",), path=r"\.(bin|json)")  # to who restores
TRIES = 2  # to read, each with all of the client's own; then the store is well again
SILENT_S = 4.0  # a stopped worker is lost; one that a busy machine holds up so long is, too
MIXTURE = {"preset": "decoder-moe-4m", "kwargs": SIZES}
DENSE = {
    "preset": "decoder-1m",
    "kwargs": {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48},
}
LLAMA = {
    "transformers": {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
}
QWEN3_MOE = {
    "transformers": LLAMA["transformers"]
    | {"model_type": "qwen3_moe", "num_hidden_layers": 4, "head_dim": 4, "mlp_only_layers": [1]}
    | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
}


@dataclass
class Disasters:
    """One after the other, each once the world before it is whole. A step's state is held by then,
    as ``snapshot.every_steps`` is 1."""

    gate: Gate
    proxy: ObjectStoreProxy
    came: list[str] = field(default_factory=list)

    def watch(self, controller: Controller) -> None:
        self.gate(controller)
        outage = controller.state.outage
        if self.came[-1:] == ["all killed"] and outage is not None and outage.tries >= TRIES:
            self.came.append("store back")
            self.proxy.set()

    def on_step(self, controller: Controller, line: dict[str, Any]) -> None:
        state, step = controller.state, line["step"]
        assert state.assignment is not None
        members = state.assignment.members
        if len(members) < controller.policy.max_workers:
            return
        if step >= 4 and not self.came:
            self.came.append("killed")
            controller.host.kill_worker(members[1].worker)
        elif step >= 8 and len(self.came) == 1:
            self.came.append("stopped")
            os.kill(members[2].pid, signal.SIGSTOP)
        elif step >= 12 and len(self.came) == 2 and state.checkpoints:
            self.came.append("all killed")
            self.proxy.set(AWAY)
            for worker in list(state.ready):
                controller.host.kill_worker(worker)


TECHNIQUES: dict[str, tuple[str, dict[str, Any], float]] = {
    "experts": ("fsdp", {"model": MIXTURE, "parallel": {"ep": 2}}, 1e-5),
    "experts, long": ("fsdp", {"model": MIXTURE, "parallel": {"ep": 2, "cp": 2}}, 1e-5),
    "stages of a llama": ("fsdp", {"model": LLAMA, "parallel": {"pp": 2}}, 1e-5),
    "experts of qwen3, long": ("fsdp", {"model": QWEN3_MOE, "parallel": {"ep": 2, "cp": 2}}, 1e-5),
    "stages of qwen3, long": ("ddp", {"model": QWEN3_MOE, "parallel": {"pp": 2, "cp": 2}}, 1e-5),
    "positions of a llama": ("fsdp", {"model": LLAMA, "parallel": {"cp": 2}}, 1e-5),
    "schedule-free": ("fsdp", {"model": DENSE, "optimizer": SCHEDULE_FREE}, 1e-5),
    "offloaded": ("fsdp", {"model": DENSE, "optimizer": {"offload": "cpu"}}, 1e-5),
    "muon": ("fsdp", {"model": DENSE, "optimizer": {"name": "muon"}}, 1e-5),
    "int8 replicas": ("hsdp", {"model": DENSE, "comm": {"compress_replicas": "int8"}}, 1e-2),
}


SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in TECHNIQUES if name != "experts"]


@pytest.mark.parametrize("technique", ["experts", *SOAK])
def test_losses_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, technique: str
) -> None:
    strategy, sections, tolerance = TECHNIQUES[technique]
    alone = run_of(tmp_path / "alone", "ddp", 1, {"model": sections["model"]} | optimizer(sections))
    with s3_server(tmp_path / "s3") as server, ObjectStoreProxy(server.endpoint) as proxy:
        environment = server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        disasters = Disasters(Gate(tmp_path / "gate"), proxy)
        run = run_of(
            tmp_path / "run",
            strategy,
            4,
            sections | {"elastic": {"multiple_of": 1, "heartbeat_timeout_s": SILENT_S}},
            folder_url=f"s3://{server.bucket}/run",
            disasters=disasters,
        )
    assert disasters.came == ["killed", "stopped", "all killed", "store back"], run.story()
    assert run.all("source_unreadable") and not run.all("checkpoint_refused"), run.story()
    (*_, last) = formed = run.all("generation_formed")
    resumed = next(line for line in formed if line["source"] == "checkpoint")
    known = [c["step"] for c in run.all("checkpoint_committed") if c["seq"] < resumed["seq"]]
    assert resumed["step"] == max(known), run.story()
    assert last["world_size"] == 4
    for line in run.recoveries:
        if line["source"] != "checkpoint":
            assert (line["steps_lost"], line["survivors_kept_pid"]) == (0, True), run.story()
    whole, mine = alone.losses(), run.losses()
    for step in range(1, STEPS + 1):
        assert math.isclose(mine[step], whole[step], rel_tol=tolerance), f"{run.story()}\n{step}"


def optimizer(sections: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {k: v for k, v in sections.get("optimizer", {}).items() if k != "offload"}}


def run_of(
    folder: Path,
    strategy: str,
    workers: int,
    sections: dict[str, Any],
    disasters: Disasters | None = None,
    **where: Any,
) -> Run:
    gate = {} if disasters is None else {"gate": str(disasters.gate.path)}
    data = {"path": "tests.multiproc.tiny:counted", "kwargs": gate}
    batch = {"global_batch_size": 14, "micro_batch_size": 2}
    common = {"data": data, "batch": batch, "checkpoint": {"every_steps": EVERY_STEPS}}
    job = make_job(strategy, steps=STEPS, workers=workers, **(common | sections))
    watch = None if disasters is None else disasters.watch
    on_step = None if disasters is None else disasters.on_step
    keepers = disasters is None  # they would have what all workers had
    return run_job(job, folder, watch=watch, on_step=on_step, keepers=keepers, **where).check()
