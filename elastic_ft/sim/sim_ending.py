"""The end of a simulated generation's training, as ``worker.last_uploads`` and ``worker.loop`` have
it: uploads that all members wait for together, the digest, and who is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastic_ft.core.assignment import WorkerId
from elastic_ft.sim.sim_worker import Collectives, SimWorker, WorkerWorld

UPLOAD_POLL_S = 0.5


class EndingWorld(WorkerWorld, Protocol):
    def watch_silent(self, worker: SimWorker, is_silent: Callable[[], bool]) -> None: ...


class EndingGroup(Collectives, Protocol):
    members: list[SimWorker]


class SimEnding:
    """Of one group. A collective begins once all members have come to it."""

    def __init__(self, world: EndingWorld, group: EndingGroup) -> None:
        self._world, self._group = world, group
        self._waiting: set[WorkerId] = set()
        self._digesting: set[WorkerId] = set()

    def wait(self, worker: SimWorker) -> None:
        """For what is being written."""
        self._waiting.add(worker.id)
        if "agrees" in self._world.undone:
            self._wait_alone(worker)
        elif len(self._waiting) == len(self._group.members):
            self._agree()

    def _agree(self) -> None:
        """Again and again: does anybody still write, is anybody asked to pause?"""
        group, members = self._group, self._group.members
        if group.failed or not group.connected():
            return
        if not any(worker.uploads for worker in members):
            for worker in members:
                self._digest(worker)
        elif any(worker.pause_flag for worker in members):
            for worker in members:
                worker.rest()
        else:
            self._world.after(UPLOAD_POLL_S, self._agree)

    def _wait_alone(self, worker: SimWorker) -> None:
        """As it once was: who has nothing left to write goes on."""
        if worker.group is not self._group or not worker.works() or self._group.failed:
            return
        if not worker.uploads:
            self._digest(worker)
        elif worker.pause_flag:
            worker.rest()
        else:
            self._world.after(UPLOAD_POLL_S, lambda: self._wait_alone(worker))

    def _digest(self, worker: SimWorker) -> None:
        group, world = self._group, self._world
        self._digesting.add(worker.id)
        world.watch_silent(worker, lambda: self._is_left_waiting(worker))
        if len(self._digesting) == len(group.members):
            for member in group.members:
                after_s = world.rng.uniform(0, 0.2)
                world.after(after_s, lambda w=member: w.done(group))  # type: ignore[misc]

    def _is_left_waiting(self, worker: SimWorker) -> bool:
        """It waits for others who are well, and is no faster for that."""
        group = self._group
        is_there = worker.group is group and not worker.is_done
        return is_there and not group.failed and group.connected()
