"""LoRA in a job file: what is frozen is in its folder alone, whatever is lost or comes in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from elastic_ft.cli import checkpoint
from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.store import open_store
from tests.multiproc.harness import PATIENT, Run, make_job, run_job
from tests.multiproc.test_pretrained_job import COUNTED, save_llama
from tests.multiproc.tiny import Counted
from tests.s3_server import s3_server

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1}
STEPS, TRIES = 20, 1
DEADLINE_S = 150.0


def tuned(base: Path | str, strategy: str, steps: int = STEPS, **sections: Any) -> Job:
    model = {"pretrained": str(base), "lora": LORA | sections.pop("lora", {})}
    rate = {"lr": 0.03, "schedule": "constant"}
    sections = {"checkpoint": {"every_steps": 5}, "optimizer": rate} | sections
    sections = {"workers": 4, "data": COUNTED} | sections
    return make_job(strategy, steps=steps, model=model, **sections)


def same(run: Run, other: Run, steps: int = STEPS) -> None:
    mine, others = run.losses(), other.losses()
    assert mine.keys() >= {*range(1, steps + 1)} <= others.keys()
    for step in range(1, steps + 1):
        assert math.isclose(mine[step], others[step], rel_tol=1e-5), f"{run.story()}\nstep {step}"


def export(run: Path, out: Path, step: int) -> Any:
    assert checkpoint.export(str(run / "checkpoints"), str(out), checkpoint.Format.PEFT, step) == 0
    return out


def loss_of(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("lora")
    save_llama(folder / "base")
    return folder / "base", run_job(tuned(folder / "base", "ddp"), folder / "run").check()


def test_peft_computes_the_next_steps_loss(undisturbed: tuple[Path, Run], tmp_path: Path) -> None:
    """Of the base as transformers loads it and the adapter as peft does, also after all workers
    have ended and others go on from the checkpoint."""
    base, out = undisturbed[0], tmp_path / "run"
    plain = {"lora": {"dropout": 0.0}, "workers": 2}
    first = run_job(tuned(base, "fsdp", 5, **plain), out).check()
    run = run_job(tuned(base, "fsdp", 7, **plain), out)
    assert run.result["status"] == "completed"
    (began, *_) = run.after(first.events[-1], "generation_formed")
    assert (began["step"], began["source"]) == (5, "checkpoint")
    assert run.ledger is not None
    samples, losses = {line["step"]: line["samples"] for line in run.ledger}, run.losses()
    for step in (1, 6):
        tokens = torch.stack([Counted()[index]["tokens"] for index in samples[step]])
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        if step > 1:
            assert not math.isclose(losses[step], loss_of(model, tokens), rel_tol=1e-4), "trained"
            adapter = export(out, tmp_path / "adapter", step - 1)
            found = {path.name for path in adapter.iterdir()}
            assert found == {"adapter_model.safetensors", "adapter_config.json"}
            model = peft.PeftModel.from_pretrained(model, adapter)
        assert math.isclose(losses[step], loss_of(model, tokens), rel_tol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("ddp", marks=pytest.mark.soak),
        pytest.param("hsdp", marks=pytest.mark.soak),
    ],
)
def test_a_killed_worker_and_its_joiner_change_nothing(
    undisturbed: tuple[Path, Run], tmp_path: Path, strategy: str
) -> None:
    base, other = undisturbed
    faults = [PointFault("backward", rank=1, step=7)]
    run = run_job(tuned(base, strategy), tmp_path / "run", faults=faults).check()
    assert len(run.worlds()) >= 2
    same(run, other)
    assert [line["steps_lost"] for line in run.recoveries] == [0] * len(run.recoveries)
    tensors = find_one(str(run.path / "checkpoints")).manifest.tensors
    kept = [name for name in tensors if name.startswith(("model.", "optim."))]
    assert kept and all(".lora_" in name for name in kept)


class BaseAway:
    """Nobody can read the base while a lost worker's replacement begins, which waits for it; nor
    from when that is ready, and about to join, until it was tried TRIES times. Training waits for
    it, and so does the job's end."""

    def __init__(self, proxy: ObjectStoreProxy, gate: Path, journal: Path) -> None:
        self.proxy, self.gate, self.journal, self.lost = proxy, gate, journal, ""
        self.fault = StoreFault("busy", methods=("GET",), path=r"base/.*safetensors$")
        self.waited = self.began = self.healed = False

    def on_step(self, controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] >= 6 and not self.lost:
            assert controller.state.assignment is not None
            self.gate.touch()
            self.lost = controller.state.assignment.members[1].worker
            self.proxy.set(self.fault)
            controller.host.kill_worker(self.lost)

    def watch(self, controller: Controller) -> None:
        state = controller.state
        if self.lost and not self.waited:
            self.waited = '"base_away"' in self.journal.read_text()
            if self.waited:
                self.proxy.set()
        elif self.waited and not self.began and self.lost not in state.ready:
            if len(state.ready) == 4:
                self.began = True
                self.proxy.set(self.fault)
        elif not self.healed and state.outage is not None and state.outage.tries >= TRIES:
            self.healed = True
            self.proxy.set()
            self.gate.unlink()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_nobody_trains_on_a_base_that_was_not_read(
    undisturbed: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Where it broke off, the next generation took what was laid out for what had been read."""
    base, other = undisturbed
    with s3_server(tmp_path / "s3") as s3, ObjectStoreProxy(s3.endpoint) as proxy:
        environment = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = open_store(s3.url("base"))
        for path in base.iterdir():
            store.put(path.name, path.read_bytes())
        away = BaseAway(proxy, tmp_path / "gate", tmp_path / "run/events.jsonl")
        data = COUNTED | {"kwargs": {"gate": str(away.gate)}}
        elastic = PATIENT | {"join_batch_s": 2.0}
        job = tuned(s3.url("base"), strategy, data=data, elastic=elastic)
        out = {"on_step": away.on_step, "watch": away.watch, "environment": environment}
        run = run_job(job, tmp_path / "run", deadline_s=DEADLINE_S, **out).check()
    (refused, waits) = (run.all("worker_refused"), run.all("base_away"))
    assert waits and not refused, run.story()
    assert away.healed and len(run.all("source_unreadable")) >= TRIES, run.story()
    assert run.worlds()[-1] == 4, run.story()
    assert [line["steps_lost"] for line in run.recoveries] == [0] * len(run.recoveries)
    same(run, other)
