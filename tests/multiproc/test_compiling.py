"""Compiled layers through a loss and a regrow: nobody compiles inside a step."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.faults import PointFault
from tests.multiproc.harness import Gate, Run, make_job, run_job
from tests.multiproc.layouts import LAYOUTS, VARIANTS, job_of, train_from_the_start
from tests.multiproc.moves import Chain, bytes_allowed
from tests.multiproc.pool import Pool
from tests.multiproc.test_experts_job import SIZES

pytestmark = pytest.mark.timeout(600)


STEPS = 20
PATIENT_ON_LOAD = {"heartbeat_timeout_s": 20, "hang_timeout_s": 60, "pause_timeout_s": 20}
PATIENT_ON_LOAD |= {"start_timeout_s": 600, "gather_s": 600, "join_batch_s": 30}
BATCH = {"global_batch_size": 8, "micro_batch_size": 2}
SHARED = VARIANTS["shallow"] | {"batch": BATCH}  # what one test has compiled the next one finds
HALVES = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64}
DENSE = {"model": {"preset": "decoder-1m", "kwargs": HALVES}, "batch": BATCH}
MIXED = {"model": {"preset": "decoder-moe-4m", "kwargs": SIZES}, "batch": BATCH}
FLOAT8 = {"precision": {"dtype": "bf16", "fp8": "tensorwise"}}


def disturbed(folder: Path, workers: int, **sections: Any) -> Chain:
    """A job of fsdp that compiles: it loses rank 1 in step 10, and is whole again about step 15."""
    gate = Gate(folder / "gate", held_open=5)
    data = {"path": "tests.multiproc.moves:watched"}
    data["kwargs"] = {"folder": str(folder), "gate": str(gate.path)}
    parallel = {"compile": True} | sections.pop("parallel", {})
    given = {"data": data, "parallel": parallel, "elastic": PATIENT_ON_LOAD} | sections
    job = make_job("fsdp", steps=STEPS, workers=workers, **given)
    faults = [PointFault("backward", rank=1, step=10)]
    found = {"faults": faults, "watch": gate, "replaces_from": 14, "deadline_s": 560}
    chain = Chain(run_job(job, folder / "run", **found).check(), folder)
    lost, joined = chain.run.recoveries
    assert lost["at_step"] == 9, chain.run.story()
    assert 14 <= joined["at_step"] < STEPS, (
        chain.run.story()
    )  # some had read data ahead of the gate
    for number, line in enumerate((lost, joined)):
        assert (line["steps_lost"], line["survivors_kept_pid"]) == (0, True), chain.run.story()
        most = bytes_allowed(chain, number)
        assert most is None or line["bytes_moved"] <= most, chain.run.story()
    return chain


def assert_losses(run: Run, tolerance: float, **sections: Any) -> None:
    """They are those of one process that compiles nothing."""
    data = {"path": "tests.multiproc.tiny:counted", "kwargs": {}}
    strategy = "fsdp" if "precision" in sections else "ddp"  # by autocast would be another rounding
    job = make_job(strategy, steps=STEPS, workers=1, data=data, **sections)
    whole, mine = run_job(job, run.path.parent / "alone").check().losses(), run.losses()
    assert mine.keys() == whole.keys()
    for step, loss in whole.items():
        assert mine[step] == pytest.approx(loss, rel=tolerance, abs=0), f"{run.story()}\n{step}"


@pytest.mark.parametrize(
    ("sections", "parallel", "tolerance"),
    [
        (DENSE | FLOAT8, {}, 0.003),
        pytest.param(MIXED, {"ep": 3}, 1e-5, marks=pytest.mark.soak),
    ],
    ids=["float8", "experts"],
)
def test_a_joiner_compiles_before_it_is_ready_and_survivors_never_again(
    tmp_path: Path, sections: dict[str, Any], parallel: dict[str, Any], tolerance: float
) -> None:
    run = disturbed(tmp_path, 3, parallel=parallel, **sections).run
    assert run.worlds() == [3, 2, 3], run.story()
    assert_all_was_compiled_early(run, graphs=1)
    assert_losses(run, tolerance, **sections)


@pytest.mark.parametrize(
    ("sections", "graphs", "tolerance"),
    [
        (SHARED, 2, 1e-5),
        pytest.param(DENSE | FLOAT8, 2, 0.003, marks=pytest.mark.soak),
    ],
    ids=["fp32", "float8"],
)
def test_layers_of_several_ranks_lose_some_and_get_others(
    tmp_path: Path, sections: dict[str, Any], graphs: int, tolerance: float
) -> None:
    """What each world compiles is known beforehand."""
    run = disturbed(tmp_path, 4, parallel={"tp": 2}, **sections).run
    assert run.worlds() == [4, 2, 4], run.story()
    assert_all_was_compiled_early(run, graphs)
    assert_losses(run, tolerance, **sections)


def assert_all_was_compiled_early(run: Run, graphs: int) -> None:
    told = run.all("compiled")
    lost, whole = len(run.all("worker_lost")), run.worlds()[0]
    assert len({line["worker"] for line in told}) == len(told) == whole + lost, run.story()
    assert [line["graphs"] for line in told] == [0] * len(told), run.story()
    assert {line["warmed"] for line in told} == {graphs}, run.story()


def generation(
    port: int, number: int, rank: int, world: int, job: Job
) -> tuple[list[dict[str, float]], int]:
    """For ``pool.Pool``. torch counts its groups from a number of this generation's own, as it does
    behind those of other dimensions."""
    c10d._world.group_count = 50 * number
    _, steps = train_from_the_start(port, number, rank, world, job, 2)
    return steps, torch_private.compiled_graphs()


def early(name: str, dtype: str, **parallel: Any) -> Job:
    """Of a job whose worlds are known."""
    workers = LAYOUTS[name][1]
    given = {"precision": {"dtype": dtype}, "elastic": {"max_workers": workers}}
    given["batch"] = {"global_batch_size": 8, "micro_batch_size": 2}
    job = job_of(name, **given)
    wanted = job.parallel.model_copy(update=parallel)
    return job.model_copy(update={"parallel": wanted})


@pytest.mark.parametrize(
    ("name", "dtype", "worlds", "again"),
    [
        ("ddp2-tp2", "fp32", (4, 2, 4), False),
        ("ddp1-tp2", "bf16", (2, 2), False),
        ("ddp1-tp2", "fp32", (2, 2), True),
        # In the graph, as test_steps_are_those_of_eager_layers has it without tp.
        pytest.param("ddp1-tp2", "fp32", (2, 2), "selective", marks=pytest.mark.soak),
    ],
)
def test_generations_compile_nothing(
    name: str, dtype: str, worlds: tuple[int, ...], again: bool | str
) -> None:
    """A graph has the name of its group in it: it is the same in every generation. Of worlds of
    several sizes each has one, and without replicas, in fp32, none is FSDP2's."""
    eager = early(name, dtype)
    compiled = early(name, dtype, compile=True, activation_checkpointing=again)
    with Pool(max(worlds)) as pool:
        expected, _ = pool(generation, eager, world=worlds[0])[0]
        found = [pool(generation, compiled, world=world) for world in worlds]
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    for steps, graphs in chain.from_iterable(found):
        assert graphs == len(set(worlds))
        assert losses_of(steps) == pytest.approx(losses_of(expected), tolerance)


def losses_of(steps: list[dict[str, float]]) -> list[float]:
    return [step["loss"] for step in steps]
