"""A kill and a stop at every named point of a step, with each layout.

One job for each layout and action goes through all points, one fault after the other: a fault is
armed when the one before it has fired and the world is whole again. Each fault is a test case of
its own, which asserts what the run folder says about it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, Gate, Run, make_job, run_job

STEPS = 100  # at most
AFTER = 4  # steps of the whole world after the last fault
WORLD = 4
CHAIN_DEADLINE_S = 160.0  # of one fault after the other
BATCH = {"global_batch_size": 4}  # of micro-batches of one sample: 2, 1 and 1 for a world of three


@dataclass(frozen=True)
class At:
    """Where a fault strikes. ``world``: smaller than WORLD means during another recovery."""

    point: str
    rank: int
    world: int = WORLD

    def __str__(self) -> str:
        where = "" if self.world == WORLD else f"-in-world-of-{self.world}"
        return f"{self.point.replace('_', '-')}{where}"


EVERYWHERE = (
    At("data", 1),
    At("forward", 2),
    At("backward", 3),
    At("reduce", 0),
    At("before_optimizer", 1),
    At("inside_optimizer", 2),
    At("after_optimizer", 3),
    At("checkpoint_shard", 2),
    At("before_manifest", 3),
    At("forming", 1),  # a survivor, while a replacement joins
    At("connecting", 3),  # the replacement itself
    At("resharding", 2),
    At("snapshot_copy", 1),
)
# The second of two faults strikes while the first is being recovered. The pairs are such that no
# shard loses both of its holders, in the cut of the four and in that of the three before.
FAULTS = {
    "ddp": (*EVERYWHERE, At("resharding", 0, world=3), At("data", 2), At("forming", 1, world=3)),
    "hsdp": (
        *EVERYWHERE[:-1],
        At("snapshot_copy", 0),
        At("resharding", 2, world=3),
        At("buddy_send", 0),
        At("connecting", 2, world=3),
    ),
    "fsdp": (
        *EVERYWHERE,
        At("resharding", 2, world=3),
        At("buddy_send", 1),
        At("connecting", 2, world=3),
    ),
}
Disturbed = Callable[[str, str], Run]
# How a stopped worker is found does not depend on the layout: CI stops those of one.
SHORT = (("ddp", "kill"), ("fsdp", "kill"), ("fsdp", "stop"))  # the others: soak
RUNS = [
    pytest.param(
        *(strategy, action),
        id=f"{strategy}-{action}",
        marks=[] if (strategy, action) in SHORT else [pytest.mark.soak],
    )
    for strategy in FAULTS
    for action in ("kill", "stop")
]
CASES = [
    pytest.param(*run.values, index, id=f"{run.id}-{index:02}-{at}", marks=run.marks)
    for run in RUNS
    for index, at in enumerate(FAULTS[str(run.values[0])])
]


def chain(strategy: str, action: Literal["kill", "stop"]) -> list[PointFault]:
    return [
        PointFault(
            at.point, action, rank=at.rank, world=at.world, after=index - 1 if index else None
        )
        for index, at in enumerate(FAULTS[strategy])
    ]


class Last:
    """Stops the job once a whole world has trained on after the last fault."""

    def __init__(self, faults: int) -> None:
        self._faults, self._steps = faults, 0

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        is_over = len(controller._executor.fired) == self._faults and line["world_size"] == WORLD
        self._steps = self._steps + 1 if is_over else 0
        if self._steps == AFTER:
            controller.stop("all faults are behind it")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same job on one worker, undisturbed."""
    out = tmp_path_factory.mktemp("one-worker")
    job = make_job("ddp", workers=1, steps=STEPS, batch=BATCH, elastic=PATIENT)
    return run_job(job, out).check()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """The job with all the faults of one layout and action; run once."""

    @functools.cache
    def run(strategy: str, action: Literal["kill", "stop"]) -> Run:
        out = tmp_path_factory.mktemp(f"{strategy}-{action}")
        gate = Gate(out / "gate")
        elastic = PATIENT if action == "kill" else {}
        checkpoint = {"every_steps": 3}
        job = gate.job(strategy, steps=STEPS, batch=BATCH, checkpoint=checkpoint, elastic=elastic)
        faults = chain(strategy, action)
        return run_job(
            job,
            out / "run",
            faults=faults,
            watch=gate,
            on_step=Last(len(faults)),
            deadline_s=CHAIN_DEADLINE_S,
        )

    return run


@pytest.mark.parametrize(("strategy", "action", "index"), CASES)
def test_recovers_from(disturbed: Disturbed, strategy: str, action: str, index: int) -> None:
    run = disturbed(strategy, action)
    fault = run.faults[index]
    fired = [line for line in run.all("fault_fired") if line["index"] == index]
    assert len(fired) == 1, f"{fault} fired {len(fired)} times\n{run.story()}"
    event = {"kill": "worker_lost", "stop": "worker_hung"}[fault.action]
    lost = [line for line in run.all(event) if line["worker"] == fired[0]["worker"]]
    assert len(lost) == 1, f"{event} is not in the journal\n{run.story()}"
    if fault.action == "kill":
        ends = [lost[0], *(e for e in run.all("worker_ended") if e["worker"] == lost[0]["worker"])]
        assert ends[-1]["reason"] == "killed by SIGKILL", f"not explained\n{run.story()}"
    recovered = run.after(lost[0], "recovered")
    assert recovered, f"no recovery followed\n{run.story()}"
    assert recovered[0]["steps_lost"] == 0, run.story()
    assert recovered[0]["survivors_kept_pid"], run.story()
    whole = [g for g in run.after(lost[0], "generation_formed") if g["world_size"] == WORLD]
    assert whole, f"the world was never whole again\n{run.story()}"


@pytest.mark.parametrize(("strategy", "action"), RUNS)
def test_nothing_is_lost(disturbed: Disturbed, reference: Run, strategy: str, action: str) -> None:
    run = disturbed(strategy, action).check("stopped")
    run.same_losses_as(reference)
    for recovery in run.recoveries:
        assert recovery["steps_lost"] == 0 and recovery["steps_redone"] <= 1, (
            f"{run.story()}\n{recovery}"
        )
    assert run.worlds()[-1] == WORLD


@pytest.mark.soak
@pytest.mark.parametrize("strategy", FAULTS)
def test_an_undisturbed_run_agrees(tmp_path: Path, reference: Run, strategy: str) -> None:
    """In CI, test_layouts says that layouts train as one process does."""
    run = run_job(make_job(strategy, steps=STEPS, batch=BATCH, elastic=PATIENT), tmp_path / "run")
    assert run.check().worlds() == [WORLD]
    assert run.recoveries == []
    run.same_losses_as(reference)
