"""Fewer bytes, and float8: jobs lose a rank, get another, and learn what one process does."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from elastic_ft.config import Job
from elastic_ft.core.sharding import Box
from elastic_ft.engines import replica_comm
from elastic_ft.faults import PointFault
from elastic_ft.state.residuals import PARTS
from tests.multiproc import pool as ranks
from tests.multiproc.harness import PATIENT, Gate, Run, make_job, run_job
from tests.multiproc.layouts import attached
from tests.multiproc.pool import Pool

STEPS = 20
MODEL = {
    "preset": "decoder-1m",
    "kwargs": {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48},
}
EASY = {"optimizer": {"lr": 3e-3}, "model": MODEL, "batch": {"micro_batch_size": 2}}


def reduced_by(
    port: int, generation: int, rank: int, world: int, job: Job
) -> list[tuple[float, float]]:
    """Of four steps: how much of the gradients is neither applied nor owed, and how much is owed,
    both as a share of the gradients. After two, replicas share what they owe."""
    found = []
    few = patch.object(replica_comm, "TOGETHER", 4000)
    with few, attached(port, generation, rank, world, job) as (engine, data, groups):
        replicas = engine._model.replicas
        reduce, parameters = replicas.reduce, replicas._parameters

        def reducing() -> None:
            share = 1 / world if int(engine.state()[PARTS].local) == 1 else 1.0
            owed = _flat(parameters, replicas._residuals) * share
            asked = _sum(_flat(parameters) / world + owed)
            reduce()
            left = _sum(_flat(parameters, replicas._pending))
            lost = asked - left - _flat(parameters)
            found.append((float(lost.norm() / asked.norm()), float(left.norm() / asked.norm())))

        replicas.reduce = reducing
        ranks.train(job, engine, data, groups, (1, 2))
        total = _sum(_flat(parameters, replicas._residuals))
        engine.share_residuals(lambda: None)
        assert int(engine.state()[PARTS].local) == 1
        assert torch.allclose(_flat(parameters, replicas._residuals), total, rtol=1e-5, atol=1e-9)
        ranks.train(job, engine, data, groups, (3, 4))
    return found


def _flat(parameters: Any, given: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Of all parameters: their gradients, or what is ``given``, zeros where there is none."""
    parts = [p.grad if given is None else given.get(n, p * 0) for n, p in parameters.items()]
    return torch.cat([part.detach().flatten() for part in parts]).double()


def _sum(values: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(values)
    return values


@pytest.fixture(scope="module")
def processes() -> Any:
    with Pool(3) as pool:
        yield pool


@pytest.mark.parametrize("method", ["int8", "powersgd"])
def test_what_is_not_applied_is_owed(processes: Pool, method: str) -> None:
    job = make_job("ddp", workers=1, comm={"compress_replicas": method}, **EASY)
    steps = processes(reduced_by, job, world=3)[0]
    assert len(steps) == 4
    assert all(lost < 1e-6 for lost, _ in steps), steps
    assert all(1e-4 < owed < 1.0 for _, owed in steps), steps


# ---------------------------------------------------------------------------- whole jobs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process that compresses nothing."""
    out = tmp_path_factory.mktemp("alone") / "run"
    data = {"path": "tests.multiproc.tiny:counted", "kwargs": {}}
    return run_job(make_job("ddp", steps=STEPS, workers=1, data=data, **EASY), out).check()


def disturbed(strategy: str, workers: int, folder: Path, **sections: Any) -> Run:
    """Its workers write down their state into ``folder``, see ``moves.watched``."""
    gate = Gate(folder / "gate")
    kwargs = {"folder": str(folder), "gate": str(gate.path)}
    data = {"path": "tests.multiproc.moves:watched", "kwargs": kwargs}
    given = EASY | {"data": data, "elastic": PATIENT} | sections
    job = make_job(strategy, steps=STEPS, workers=workers, **given)
    faults = [PointFault("backward", rank=1, step=10)]
    run = run_job(job, folder / "run", faults=faults, watch=gate).check()
    assert run.worlds() == [workers, workers - 1, workers], run.story()
    assert all(line["survivors_kept_pid"] for line in run.recoveries)
    assert [line["steps_lost"] for line in run.recoveries] == [0, 0]
    return run


def assert_close(run: Run, alone: Run, bound: float) -> None:
    whole, mine = alone.losses(), run.losses()
    for step in range(1, STEPS + 1):
        assert math.isclose(mine[step], whole[step], rel_tol=bound), f"{run.story()}\nstep {step}"


Pieces = list[tuple[str, tuple[int, ...], Any, np.ndarray]]


def written(folder: Path) -> dict[tuple[int, int, str], dict[str, Pieces]]:
    """By generation, step and kind, the residuals of each worker."""
    found: dict[tuple[int, int, str], dict[str, Pieces]] = {}
    for file in folder.glob("g*.s*.*"):
        generation, step, kind, name = file.name.split(".")
        pieces = [p for p in pickle.loads(file.read_bytes()) if p[0].endswith(".residual")]
        found.setdefault((int(generation[1:]), int(step[1:]), kind), {})[name] = pieces
    return found


def assert_all_that_was_there_is_owed(folder: Path, run: Run) -> None:
    """After a change each has the sum of what the members that are still there had, if they had
    any: the killed one's is lost, a joiner had none."""
    states, owed = written(folder), 0.0
    for generation, step in [key[:2] for key in states if key[2] == "restored" and key[1]]:
        after = states[generation, step, "restored"]
        before = max(key for key in states if key[1:] == (step, "trained") and key[0] < generation)
        sums: dict[str, np.ndarray] = {}
        for name in states[before].keys() & after.keys():
            for tensor, shape, box, values in states[before][name]:
                total = sums.setdefault(tensor, np.zeros(shape, np.float64))
                total[box.slices_within(Box.whole(shape))] += values
        for pieces in after.values():
            for tensor, shape, box, values in pieces:
                expected = sums[tensor][box.slices_within(Box.whole(shape))]
                assert np.allclose(values, expected, rtol=1e-5, atol=1e-10), run.story()
                owed += float(np.abs(values).sum())
    assert owed


CASES = [
    pytest.param("fsdp", 3, {"comm": {"compress_shards": "int8"}}, 0.003, id="fsdp int8"),
    pytest.param("hsdp", 4, {"comm": {"compress_replicas": "int8"}}, 0.003, id="hsdp int8"),
    pytest.param("ddp", 3, {"comm": {"compress_replicas": "powersgd"}}, 0.06, id="ddp powersgd"),
    pytest.param(
        "fsdp", 3, {"precision": {"dtype": "bf16", "fp8": "tensorwise"}}, 0.003, id="fsdp fp8"
    ),
]


@pytest.mark.parametrize(("strategy", "workers", "sections", "bound"), CASES)
def test_a_killed_worker_and_its_joiner_are_within_the_bound(
    alone: Run,
    tmp_path: Path,
    strategy: str,
    workers: int,
    sections: dict[str, Any],
    bound: float,
) -> None:
    run = disturbed(strategy, workers, tmp_path, **sections)
    assert_close(run, alone, bound)
    lost = run.all("residual_lost")
    if "compress_replicas" not in sections.get("comm", {}):
        assert not lost
        return
    assert len(lost) == 1  # the killed one's: the joiner takes none away
    assert f"1 of {2 if strategy == 'hsdp' else 3} parts" in lost[0]["reason"]
    assert_all_that_was_there_is_owed(tmp_path, run)
