"""Compiled layers through a loss and a regrow: nobody compiles inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, Gate, make_job, run_job
from tests.multiproc.test_experts_job import SIZES

pytestmark = pytest.mark.timeout(500)


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
