"""Schedule-free and offloaded optimizers in whole jobs: a worker is killed while it evaluates.

At that moment parameters are the averages, and no longer what steps go on from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.core.sharding import Box
from elastic_ft.faults import PointFault
from elastic_ft.models.build import build_model
from elastic_ft.models.loss import loss_and_named
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.shards import Want
from tests.multiproc.harness import PATIENT, Gate, Run, make_job, run_job
from tests.multiproc.layouts import COMMON
from tests.multiproc.tiny import Lethal

STEPS, KILLED_AFTER = 20, 10
SCHEDULE_FREE = {
    "name": "schedule_free_adamw",
    "schedule": "constant",
    "warmup_steps": 4,
    "groups": [{"match": "embedding.*", "lr": 1e-3}],
}


def run_of(
    folder: Path,
    strategy: str,
    workers: int,
    faults: tuple[PointFault, ...] = (),
    **optimizer: Any,
) -> Run:
    gate = Gate(folder / "gate")
    many = {"gate": str(gate.path), "mark": str(folder / "mark")} if workers > 1 else {}
    data = {"path": "tests.multiproc.tiny:counted_and_held_out", "kwargs": many}
    data |= {"eval_every_steps": 5, "eval_samples": 6}
    given = {**COMMON, "data": data, "elastic": PATIENT, "optimizer": {"lr": 3e-3, **optimizer}}
    job = make_job(strategy, workers=workers, **given)
    return run_job(job, folder / "run", faults=faults, watch=gate).check()


def held_out(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.all("evaluated")}


def scalars(run: Run) -> dict[str, float]:
    """What is counted for groups, in the checkpoint of the last step."""
    reader, found = find_one(str(run.path / "checkpoints")), {}
    for name, spec in reader.manifest.tensors.items():
        if name.startswith("engine.group"):
            value = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            out = memoryview(value.reshape(-1).view(torch.uint8).numpy())
            reader.read([Want(name, Box.whole(()), out)])
            found[name.removeprefix("engine.")] = value.item()
    return found


def exported_loss(run: Run, folder: Path) -> float:
    """Held out, of what others get."""
    command = ["checkpoint", "export", str(run.path / "checkpoints"), str(folder)]
    assert run_command([*command, "--format", "safetensors"]) == COMPLETED
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    samples = Lethal(None)
    model = build_model(run.job.model, vocab_size=samples.vocab_size, sequence_length=None)
    model.load_state_dict(weights)
    batch = samples.collate([samples[index] for index in range(6)])
    with torch.no_grad():
        loss, count, _ = loss_and_named(model, batch)
    return float(loss) / float(count)


def check(run: Run, alone: Run) -> None:
    assert run.worlds() == [3, 2, 3], run.story()
    assert all(line["survivors_kept_pid"] for line in run.recoveries)
    assert [line["steps_lost"] for line in run.recoveries] == [0, 0]
    # With ddp others may break in that step's agreement, and make it again.
    least = KILLED_AFTER - (run.job.parallel.strategy == "ddp")
    assert least <= run.recoveries[0]["at_step"] <= KILLED_AFTER, run.story()
    # The evaluation after step 10 was broken off.
    assert held_out(alone).keys() - held_out(run).keys() <= {KILLED_AFTER}
    assert run.losses().keys() == alone.losses().keys()
    for found, expected in ((run.losses(), alone.losses()), (held_out(run), held_out(alone))):
        for step, loss in ((step, expected[step]) for step in found):
            assert math.isclose(found[step], loss, rel_tol=1e-5), f"{run.story()}\nstep {step}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, which keeps all on its device."""
    return run_of(tmp_path_factory.mktemp("alone"), "ddp", 1, **SCHEDULE_FREE)


SLOW = PointFault("snapshot_copy", "slow", rank=0, step=KILLED_AFTER, lasts_s=1.0)


@pytest.mark.parametrize(
    ("strategy", "offload", "faults"),
    [("ddp", None, ()), ("fsdp", None, (SLOW,)), ("fsdp", "cpu", ())],
    ids=["ddp", "fsdp", "fsdp offloaded"],
)
def test_killed_while_it_evaluates(
    alone: Run, tmp_path: Path, strategy: str, offload: str | None, faults: tuple[PointFault, ...]
) -> None:
    """Where snapshots are slow: they are of what steps go on from all the same."""
    run = run_of(tmp_path, strategy, 3, faults, **SCHEDULE_FREE, offload=offload)
    check(run, alone)
    counted = scalars(run)
    assert counted == pytest.approx(scalars(alone), rel=1e-6)
    assert {counted[name] for name in counted if name.endswith(".k")} == {STEPS}
    last = held_out(run)[STEPS]
    assert math.isclose(exported_loss(run, tmp_path / "exported"), last, rel_tol=1e-5)
    assert not math.isclose(last, run.losses()[STEPS], rel_tol=1e-3)
