"""A mixture of experts through losses and joiners: biases are one process's to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.config import Job
from elastic_ft.core.sharding import Box
from elastic_ft.faults import PointFault
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.shards import Want
from tests.multiproc.harness import PATIENT, Gate, Run, make_job, run_job

STEPS = 12
COUNTED = {"path": "tests.multiproc.tiny:counted"}
SIZES = {
    "n_layers": 2,
    "dim": 32,
    "n_heads": 2,
    "n_kv_heads": 1,
    "ffn_dim": 48,
    "expert_ffn_dim": 16,
    "router_loss": 0.01,
    "bias_rate": 0.01,
}


def mixture(strategy: str, workers: int, gate: Path | None = None, **sections: Any) -> Job:
    data = COUNTED | ({"kwargs": {"gate": str(gate)}} if gate is not None else {})
    model = {"preset": "decoder-moe-4m", "kwargs": SIZES}
    batch = {"global_batch_size": 14, "micro_batch_size": 2}
    given = {"data": data, "model": model, "batch": batch} | sections
    return make_job(strategy, steps=STEPS, workers=workers, **given)


def biases(run: Run) -> dict[str, list[float]]:
    """As the checkpoint of the last step has them."""
    reader, found = find_one(str(run.path / "checkpoints")), {}
    assert reader.manifest.step == STEPS
    for name, spec in reader.manifest.tensors.items():
        if name.endswith("ffn.bias"):
            values = torch.empty(spec.shape)
            bytes_of = memoryview(values.view(torch.uint8).numpy())
            reader.read([Want(name, Box.whole(spec.shape), bytes_of)])
            found[name] = values.tolist()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("alone") / "run"
    return run_job(mixture("ddp", 1), out).check()


@pytest.mark.parametrize(
    ("strategy", "parallel", "layouts"),
    [
        ("fsdp", {}, ["fsdp4", "fsdp3", "fsdp4"]),
        ("fsdp", {"ep": 2, "cp": 2}, ["fsdp2-cp2-ep2", "fsdp3-ep3", "fsdp2-cp2-ep2"]),
        pytest.param(
            *("ddp", {"activation_checkpointing": True}, ["ddp4", "ddp3", "ddp4"]),
            marks=pytest.mark.soak,
        ),
        pytest.param("hsdp", {}, ["hsdp2x2", "fsdp3", "hsdp2x2"], marks=pytest.mark.soak),
    ],
    ids=["fsdp", "fsdp-cp-ep", "ddp", "hsdp"],
)
def test_a_killed_worker_and_its_joiner_change_nothing(
    alone: Run, tmp_path: Path, strategy: str, parallel: dict[str, Any], layouts: list[str]
) -> None:
    """Seven micro-batches on 4, 3 and 4 ranks: some have padding, whose tokens nobody counts.

    Where ranks share eight experts out, two share them, then three (3, 3, 2), then two; and two
    the positions of each sample, then none, then two.
    """
    gate = Gate(tmp_path / "gate")
    job = mixture(strategy, 4, gate.path, parallel=parallel, elastic=PATIENT | {"multiple_of": 1})
    faults = [PointFault("backward", rank=1, step=5)]
    run = run_job(job, tmp_path / "run", faults=faults, watch=gate).check()
    assert run.worlds() == [4, 3, 4], run.story()
    assert [line["layout"] for line in run.all("generation_formed")] == layouts
    assert [line["steps_lost"] for line in run.recoveries] == [0, 0]
    assert all(line["survivors_kept_pid"] for line in run.recoveries)
    whole, mine = alone.losses(), run.losses()
    for step in range(1, STEPS + 1):
        assert math.isclose(mine[step], whole[step], rel_tol=1e-5), f"{run.story()}\nstep {step}"
    expected = biases(alone)
    assert len(expected) == 2 and all(any(values) for values in expected.values())
    assert biases(run) == expected
