"""Transformers models whose positions ranks share, through a loss and a joiner: one process's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.faults import PointFault
from tests.multiproc.harness import Gate, make_job, run_job

pytest.importorskip("transformers")

STEPS = 20
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "vocab_size": 102,
}
LLAMA = SIZES | {"model_type": "llama", "tie_word_embeddings": True}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": 5}
HEADS = MISTRAL | {"num_attention_heads": 4}  # of keys and values two
BY_HEADS: dict[str, Any] = {"cp_method": "ulysses"}
MIXTRAL = SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# model, strategy, parallel section, layouts of four workers, of three, and of four
RUNS: dict[str, tuple[dict[str, Any], str, dict[str, Any], list[str]]] = {
    "llama": (LLAMA, "fsdp", {"cp": 2}, ["fsdp2-cp2", "fsdp3", "fsdp2-cp2"]),
    "window": (MISTRAL, "hsdp", {"cp": 2}, ["fsdp2-cp2", "fsdp3", "fsdp2-cp2"]),
    "all of them": (MISTRAL, "fsdp", {"cp": 4}, ["ddp1-cp4", "ddp1-cp3", "ddp1-cp4"]),
    "heads": (HEADS, "fsdp", {"cp": 2} | BY_HEADS, ["fsdp2-cp2", "fsdp3", "fsdp2-cp2"]),
    "heads of all of them": (HEADS, "ddp", {"cp": 4} | BY_HEADS, ["ddp1-cp4", "ddp3", "ddp1-cp4"]),
    # Three ranks gather keys and values.
    "heads if they can": (
        *(HEADS, "fsdp", {"cp": 4, "cp_method": "auto", "activation_checkpointing": "selective"}),
        ["ddp1-cp4", "ddp1-cp3", "ddp1-cp4"],
    ),
    "tensor parallel": (LLAMA, "ddp", {"cp": 2, "tp": 2}, ["ddp1-cp2-tp2", "ddp3", "ddp1-cp2-tp2"]),
    "stages": (MISTRAL, "fsdp", {"cp": 2, "pp": 2}, ["pp2-ddp1-cp2", "fsdp3", "pp2-ddp1-cp2"]),
    "experts": (
        *(MIXTRAL, "fsdp", {"cp": 2, "ep": 2}),
        ["fsdp2-cp2-ep2", "fsdp3-ep3", "fsdp2-cp2-ep2"],
    ),
}
pytestmark = pytest.mark.soak  # one such move is among test_moves


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_worker_and_its_joiner_change_nothing(
    tmp_path: Path, name: str, packed: bool
) -> None:
    config, strategy, parallel, layouts = RUNS[name]
    gate = Gate(tmp_path / "gate")
    data = {"path": f"tests.multiproc.tiny:{'apart' if packed else 'counted'}"}
    given: dict[str, Any] = {"steps": STEPS, "model": {"transformers": config}, "data": data}
    alone = run_job(make_job("ddp", workers=1, **given), tmp_path / "alone").check()
    given["data"] = data | {"kwargs": {"gate": str(gate.path)}}
    sections: dict[str, Any] = {"parallel": parallel, "elastic": {"multiple_of": 1}}
    job = make_job(strategy, workers=4, **given, **sections)
    faults = [PointFault("backward", rank=1, step=10)]
    run = run_job(job, tmp_path / "run", faults=faults, watch=gate).check()
    assert [line["layout"] for line in run.all("generation_formed")] == layouts, run.story()
    assert [line["steps_lost"] for line in run.recoveries] == [0, 0]
    assert all(line["survivors_kept_pid"] for line in run.recoveries)
    whole, mine = alone.losses(), run.losses()
    for step in range(1, STEPS + 1):
        assert math.isclose(mine[step], whole[step], rel_tol=1e-5), f"{run.story()}\nstep {step}"
