"""A run that loses workers, for all tests that look at one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from tests.multiproc.harness import Run, make_job, run_job


class Lifetimes:
    """When worker processes were alive, as the kernel sees it; polled by the harness."""

    def __init__(self) -> None:
        self.processes: dict[int, psutil.Process] = {}
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def __call__(self, controller: Controller) -> None:
        for member in list(controller.state.ready.values()):
            if member.pid not in self.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = self.processes[member.pid] = psutil.Process(member.pid)
                    self.first[member.pid] = self.last[member.pid] = process.create_time()
        for pid, process in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.last[pid] = time.time()

    def seconds(self) -> float:
        return sum(self.last[pid] - self.first[pid] for pid in self.first)


def disturbed_run(out: Path) -> tuple[Run, Lifetimes]:
    """A worker is killed, another hangs; both are replaced."""
    alive = Lifetimes()
    job = make_job("fsdp", steps=60, workers=3, checkpoint={"every_steps": 20})
    faults = [
        PointFault("backward", rank=1, step=15),
        PointFault("forward", "stop", rank=0, step=35),
    ]
    return run_job(job, out, faults=faults, watch=alive).check(), alive
