"""Compiled layers through a loss and a regrow: nobody compiles inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, Gate, make_job, run_job
from tests.multiproc.layouts import job_of, train_from_the_start
from tests.multiproc.pool import Pool
from tests.multiproc.test_experts_job import SIZES

pytestmark = pytest.mark.timeout(500)


HALVES = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 32}
MIXTURE = {"preset": "decoder-moe-4m", "kwargs": SIZES}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {}),
        pytest.param({"model": MIXTURE}, {"ep": 3}, marks=pytest.mark.soak),
    ],
    ids=["decoder", "experts"],
)
def test_a_joiner_compiles_before_it_is_ready_and_survivors_never_again(
    tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    gate, compiled = Gate(tmp_path / "gate"), {"compile": True} | parallel
    job = gate.job("fsdp", steps=14, workers=3, parallel=compiled, elastic=PATIENT, **model)
    faults = [PointFault("backward", rank=1, step=5)]
    run = run_job(job, tmp_path / "run", faults=faults, watch=gate, deadline_s=400).check()
    assert run.worlds() == [3, 2, 3], run.story()
    told = run.all("compiled")
    assert len({line["worker"] for line in told}) == len(told) == 4, run.story()
    assert [line["graphs"] for line in told] == [0] * 4, run.story()
    assert {line["warmed"] for line in told} == {1}, run.story()
    alone = make_job("ddp", steps=14, workers=1, **model)
    run.same_losses_as(run_job(alone, tmp_path / "alone"))


def test_layers_of_several_ranks_lose_some_and_get_others(tmp_path: Path) -> None:
    """Each world traces them anew, in its first step: that is told."""
    gate = Gate(tmp_path / "gate")
    shared, model = {"compile": True, "tp": 2}, {"preset": "decoder-1m", "kwargs": HALVES}
    job = gate.job("fsdp", steps=14, workers=4, parallel=shared, elastic=PATIENT, model=model)
    faults = [PointFault("backward", rank=1, step=5)]
    run = run_job(job, tmp_path / "run", faults=faults, watch=gate, deadline_s=400).check()
    assert run.worlds() == [4, 2, 4], run.story()
    (lost, joined) = run.recoveries
    assert lost["steps_lost"] == joined["steps_lost"] == 0, run.story()
    assert lost["survivors_kept_pid"] and joined["survivors_kept_pid"], run.story()
    told = run.all("compiled")
    assert {line["warmed"] for line in told if line["warmed"]} == {1}, run.story()
    alone = make_job("ddp", steps=14, workers=1, model=model)
    run.same_losses_as(run_job(alone, tmp_path / "alone"))


def generation(
    port: int, number: int, rank: int, world: int, job: Job
) -> tuple[list[dict[str, float]], int]:
    """For ``pool.Pool``. torch counts its groups from a number of this generation's own, as it does
    behind those of other dimensions."""
    c10d._world.group_count = 50 * number
    _, steps = train_from_the_start(port, number, rank, world, job, 2)
    return steps, torch_private.compiled_graphs()


def test_a_new_generation_of_the_same_ranks_compiles_nothing() -> None:
    """A graph has the name of its group in it: it is the same in every generation."""
    sections = {"compile": True, "tp": 2}
    eager = job_of("ddp1-tp2")
    compiled = eager.model_copy(update={"parallel": eager.parallel.model_copy(update=sections)})
    with Pool(2) as pool:
        expected = pool(generation, eager, world=2)
        found = [pool(generation, compiled, world=2) for _ in range(3)]
    assert [[graphs for _, graphs in ranks] for ranks in found] == [[1, 1]] * 3
    for (steps, _), *_ in found:
        assert [s["loss"] for s in steps] == pytest.approx(
            [s["loss"] for s in expected[0][0]], 1e-6
        )
