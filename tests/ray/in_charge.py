"""A job whose driver is a process of its own, and what can be done to who is in charge of it.

Everything is read from the run folder, as a user would.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from trial import START_S, Seen

from elastic_ft.config import parse_job
from elastic_ft.hosts.local import run_local
from elastic_ft.hosts.ray import fork_client, fork_server
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.controller_place import LABEL
from elastic_ft.hosts.ray.names import ROOT, RunNames, actor_named, actors_of, groups_of
from elastic_ft.hosts.ray.warm_standby import whose
from elastic_ft.observe.alive import Vigil
from elastic_ft.observe.run_reader import read_lines

DRIVER = Path(__file__).parent / "in_charge_driver.py"
BACK_S = 90.0  # for a controller to be back, cold, on two shared cores
READY_S = 300.0  # for standbys, which import torch beside a job that trains
LINK_S = 1.0  # while a template imports its backlog fills: no link is to be had then
AFTER_STEPS = 8  # committed after each fault
OF_LOSSES = ("model", "data", "batch", "parallel", "optimizer")
_undisturbed: dict[str, list[float]] = {}
TWO: dict[str, Any] = {
    "elastic": {"min_workers": 1, "max_workers": 2, "gather_s": 60},
    "parallel": {"strategy": "fsdp"},
    "checkpoint": {"every_steps": 10_000},
    "optimizer": {"schedule": "constant"},  # the same for however many steps
}


@contextlib.contextmanager
def two_and_two(cpus: float = 1) -> Iterator[LocalCluster]:
    """Two nodes with room for workers, two that may have the controller."""
    away = {"durable_head": True, "controllers_on_head": False}
    with LocalCluster(2, cpus, **away, templates=False) as cluster:  # for its own driver alone
        cluster.connect()
        while len(cluster.node_ids) < 4:
            cluster.add_node(cpus=0, labels={LABEL: "true"})
        yield cluster
        wait_for(lambda: not actors_of(ROOT) and not groups_of(ROOT), 30, "nothing is left")
        assert {entry["state"] for entry in placement_group_table().values()} <= {"REMOVED"}


class DrivenJob(Seen):
    """A context manager: what it started is gone at its end.

    Args:
        patience: times each time limit: of a soak beside other work.
    """

    def __init__(
        self, cluster: LocalCluster, values: dict[str, Any], folder: Path, patience: float = 1
    ) -> None:
        self.cluster, self.values, self.folder = cluster, values, folder
        self._patience = patience
        self._driver = self._start_driver()

    def __enter__(self) -> DrivenJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver.poll() is None:
            self._driver.kill()
        self._driver.wait()
        if (controller := actor_named(self.names.controller)) is not None:
            for _ in range(2):
                controller.stop.remote("the test is over")  # type: ignore[attr-defined]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(controller.await_result.remote(), timeout=BACK_S)  # type: ignore[attr-defined]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(controller)

    def _start_driver(self) -> subprocess.Popen[bytes]:
        arguments = [self.cluster.address, json.dumps(self.values), str(self.folder)]
        return subprocess.Popen([sys.executable, str(DRIVER), *arguments])

    @property
    def names(self) -> RunNames:
        return RunNames(self.values["name"], str(self.folder))

    # ------------------------------------------------------------------ what is seen

    @property
    def world(self) -> int:
        steps = self.lines("steps.jsonl")
        return int(steps[-1]["world_size"]) if steps else 0

    def ready_standbys(self) -> list[str]:
        """The nodes where a controller would be forked."""
        return [node for node in self.cluster.node_ids if self._is_ready(node)]

    def _is_ready(self, node: str) -> bool:
        with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError, psutil.Error):
            link.settimeout(LINK_S)
            link.connect(fork_client.name_of(node, whose(self.names.prefix)))
            listener = psutil.Process(fork_client.listener_of(link))
            return fork_server.__name__ in listener.cmdline()
        return False

    def pids(self) -> list[int]:
        return sorted(member["pid"] for member in self.members())

    def controller_pid(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            return self.cluster.controller_pid()
        return None

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = BACK_S) -> None:
        try:
            wait_for(condition, timeout_s * self._patience, what)
        except TimeoutError as error:
            for line in self.lines("events.jsonl"):
                print(json.dumps(line))
            pytest.fail(f"{error}; {self.step} steps")

    def wait_for_steps(self, count: int, timeout_s: float = BACK_S) -> None:
        until = self.step + count
        self.wait(f"{count} more steps", lambda: self.step >= until, timeout_s)

    def wait_for_start(self, world: int) -> None:
        def trains() -> bool:
            steps = self.lines("steps.jsonl")
            return len(steps) > AFTER_STEPS and steps[-1]["world_size"] == world

        self.wait(f"{world} workers train", trains, START_S)
        keepers = len({member["node"] for member in self.members()})
        self.wait("keepers", lambda: len(self.events("keeper_ready")) >= keepers)

    def gap_s(self, since_s: float, until_s: float = math.inf) -> float:
        """The longest time between two trained steps, of which one is after ``since_s`` and one
        before ``until_s``."""
        at_s = [line["applied_at_s"] for line in self.lines("steps.jsonl")]
        pairs = [(a, b) for a, b in itertools.pairwise(at_s) if b > since_s and a < until_s]
        return max((b - a for a, b in pairs), default=0.0)

    # ------------------------------------------------------------------ what is done

    @contextlib.contextmanager
    def driver_stopped(self) -> Iterator[None]:
        with stopped(self._driver.pid):
            yield

    def kill_driver(self) -> None:
        self._driver.kill()
        self._driver.wait()

    def kill_controller(self) -> None:
        os.kill(self.cluster.controller_pid(), signal.SIGKILL)

    def kill_worker(self, rank: int) -> int:
        """Returns its pid."""
        pid = int(self.members()[rank]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_controllers_node(self) -> None:
        self.cluster.kill_node(self.cluster.node_of_pid(self.cluster.controller_pid()))

    def wait_for_adoption(self, before: int) -> None:
        """Until another controller is in charge than the first ``before``, and commits. Who looks
        at the run folder takes the job for alive all the while."""
        vigil = Vigil(str(self.folder))

        def follows() -> bool:
            assert (dead := vigil.look()) == "", dead
            return len(self.events("in_charge")) > before

        self.wait("the next controller", follows)
        self.wait_for_steps(AFTER_STEPS)

    def stop(self) -> dict[str, Any]:
        """Returns what is in result.json."""
        controller = actor_named(self.names.controller)
        assert controller is not None
        controller.stop.remote("the test has seen enough")  # type: ignore[attr-defined]
        self.wait("its end", lambda: (self.folder / "result.json").exists())
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def losses(self) -> list[float]:
        """Of each step, once."""
        steps = self.lines("steps.jsonl")
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
        return [line["loss"] for line in steps]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def undisturbed(values: dict[str, Any], steps: int, folder: Path) -> list[float]:
    """Losses of the same job with nobody killed: on plain processes, at full speed; once for all
    tests whose jobs have the same."""
    sections = {name: values.get(name) for name in OF_LOSSES}
    key = json.dumps([sections, values["elastic"]["max_workers"]])
    if len(_undisturbed.get(key, ())) < steps:
        data = values["data"] | {"kwargs": {"pause_s": 0.0}}
        run_local(parse_job(values | {"steps": steps, "data": data}), str(folder))
        _undisturbed[key] = [line["loss"] for line in read_lines(folder / "steps.jsonl")]
    return _undisturbed[key][:steps]


def check_nothing_lost(run: DrivenJob, pids: list[int], tmp_path: Path) -> None:
    losses = run.losses()
    assert all(map(alive, pids)), "a worker's process has ended"
    assert run.stop()["status"] == "stopped"
    assert run.events("controller_restarted") == run.events("rolled_back") == []
    same = undisturbed(run.values, len(losses), tmp_path / "undisturbed")
    if len(run.events("generation_formed")) > 1:  # another world adds up in another order
        assert losses == pytest.approx(same, rel=1e-4)
    else:
        assert losses == same
    assert len(run.events("job_started")) == 1
