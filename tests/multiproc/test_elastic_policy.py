"""Who makes the world, on real processes: spares, resizing, worlds in multiples, the planner's
choice, and a rank that is slower than the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ft.observe import requests
from elastic_ft.runtime.controller import Controller
from elastic_ft.runtime.faults import Fault
from tests.multiproc.harness import Run, make_job, run_job

NODES = {"a": 2, "b": 2, "c": 2}


def kill_after(step: int, worker: str) -> Callable[[Controller, dict[str, Any]], None]:
    """SIGKILL once that step is committed."""

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] == step:
            controller.host.kill_worker(worker)

    return on_step


def idle_of(line: dict[str, Any]) -> dict[str, str]:
    return {idle["worker"]: idle["reason"] for idle in line["idle"]}


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path: Path) -> None:
    elastic = {"min_workers": 2, "spares": 1}
    job = make_job("fsdp", workers=3, steps=10, elastic=elastic)
    nodes = {f"n{i}": 1 for i in range(4)}

    def on_step(controller: Controller, line: dict[str, Any]) -> None:
        state = controller.state
        if line["step"] >= 3 and len(state.ready) == 4 and not lost:
            lost.append(controller.state.assignment.members[1].worker)
            controller.host.kill_worker(lost[0])

    lost: list[str] = []
    run = run_job(job, tmp_path / "run", nodes=nodes, on_step=on_step).check()
    assert lost, run.story()
    assert run.worlds()[:2] == [3, 3]
    (used,) = [line for line in run.all("spare_used") if line["replaces"] == lost[0]]
    (recovery, *_) = run.recoveries
    assert (recovery["cause"], recovery["world_before"], recovery["world_after"]) == (
        "worker_lost",
        3,
        3,
    )
    assert recovery["steps_lost"] == 0
    assert used["worker"] in {m["worker"] for m in run.all("generation_formed")[1]["members"]}
    run.same_losses_as(run_job(make_job("fsdp", workers=2, steps=10), tmp_path / "calm"))
