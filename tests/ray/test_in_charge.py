"""Whoever is in charge of a job may die: workers keep their processes and train on.

Controllers run off the head here, as on a fleet, and the GCS is back from its own disk.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from in_charge import AFTER_STEPS, DrivenJob, alive
from ray.util.placement_group import placement_group_table
from trial import job

from elastic_ft.config import parse_job
from elastic_ft.hosts.local import run_local
from elastic_ft.hosts.ray import fork_server
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.controller_place import LABEL
from elastic_ft.hosts.ray.names import ROOT, actors_of, groups_of
from elastic_ft.observe.run_reader import read_lines

pytestmark = pytest.mark.timeout(400)
AWAY_S = 6.0  # of the GCS
TWO: dict[str, Any] = {
    "elastic": {"min_workers": 1, "max_workers": 2, "gather_s": 60},
    "parallel": {"strategy": "fsdp"},
    "checkpoint": {"every_steps": 10_000},
    "optimizer": {"schedule": "constant"},  # the same for however many steps
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes with room for a worker, two that may have the controller."""
    away = {"durable_head": True, "controllers_on_head": False}
    with LocalCluster(2, **away, templates=False) as cluster:  # for the cluster's own driver alone
        cluster.connect()
        while len(cluster.node_ids) < 4:
            cluster.add_node(cpus=0, labels={LABEL: "true"})
        yield cluster
        wait_for(lambda: not actors_of(ROOT) and not groups_of(ROOT), 30, "nothing is left")
        assert {entry["state"] for entry in placement_group_table().values()} <= {"REMOVED"}


def undisturbed(values: dict[str, Any], steps: int, folder: Path) -> list[float]:
    """Losses of the same job with nobody killed: on plain processes, at full speed."""
    data = values["data"] | {"kwargs": {"pause_s": 0.0}}
    run_local(parse_job(values | {"steps": steps, "data": data}), str(folder))
    return [line["loss"] for line in read_lines(folder / "steps.jsonl")]


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


def test_driver_and_controller_are_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    """And the next controller is stopped: Ray does not notice that, keepers do."""
    with DrivenJob(cluster, job("charge", **TWO), tmp_path / "charge") as run:
        run.wait_for_start(2)
        pids = run.pids()
        head = {process.pid for process in cluster.head_processes()}
        assert cluster.controller_pid() not in head
        run.kill_driver()
        run.wait_for_steps(AFTER_STEPS)
        first, killed_at_s = cluster.controller_pid(), time.time()
        run.kill_controller()
        run.wait_for_adoption(len(run.events("in_charge")))
        assert cluster.controller_pid() != first
        assert len(run.events("generation_formed")) == 1
        second = cluster.controller_pid()
        os.kill(second, signal.SIGSTOP)
        run.wait_for_adoption(len(run.events("in_charge")))
        assert not alive(second)
        assert len(run.events("generation_formed")) == 1
        print(f"longest gap: {run.gap_s(killed_at_s):.2f} s")
        check_nothing_lost(run, pids, tmp_path)


def test_controllers_node_and_a_worker_are_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    """The run folder is on a disk that the others see; another node is ready for the next one."""
    values = job("both", **TWO | {"elastic": TWO["elastic"] | {"standby": True}})
    with DrivenJob(cluster, values, tmp_path / "both") as run:
        run.wait_for_start(2)
        standbys = [name for name in actors_of(run.names.prefix) if "/standby/" in name]
        assert len(standbys) == 2
        before = len(run.events("in_charge"))
        run.kill_controllers_node()
        victim = run.kill_worker(1)
        (survivor,) = set(run.pids()) - {victim}
        run.wait_for_adoption(before)
        run.wait("the survivor trains", lambda: run.pids()[0] == survivor or len(run.pids()) == 2)
        assert survivor in run.pids() and victim not in run.pids()
        parent = psutil.Process(cluster.controller_pid()).parent()
        assert parent is not None and fork_server.__name__ in parent.cmdline()
        cluster.add_node(cpus=0, labels={LABEL: "true"})
        check_nothing_lost(run, [survivor], tmp_path)
        assert {line["steps_lost"] for line in run.events("recovered")} == {0}


# ------------------------------------------------------------------------------------- soak


def controller(run: DrivenJob) -> None:
    run.kill_controller()


def controller_and_worker(run: DrivenJob) -> None:
    run.kill_controller()
    run.kill_worker(1)


def controllers_node(run: DrivenJob) -> None:
    run.kill_controllers_node()
    run.cluster.add_node(cpus=0, labels={LABEL: "true"})


def away(run: DrivenJob) -> None:
    until_s = time.monotonic() + AWAY_S
    run.wait("the outage's end", lambda: time.monotonic() > until_s)


def gcs(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.wait_for_steps(AFTER_STEPS)  # committed without it
    away(run)
    run.cluster.restart_gcs()


def gcs_and_worker(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.kill_worker(1)
    run.wait_for_steps(AFTER_STEPS)
    away(run)
    run.cluster.restart_gcs()


def gcs_and_controller(run: DrivenJob) -> None:
    run.cluster.kill_gcs()
    run.kill_controller()
    away(run)
    run.cluster.restart_gcs()


def controller_stopped(run: DrivenJob) -> None:
    """For less than a heartbeat may take: then keepers end it, and it is adopted after."""
    pid = run.cluster.controller_pid()
    os.kill(pid, signal.SIGSTOP)
    away(run)
    os.kill(pid, signal.SIGCONT)


FAULTS: dict[str, Callable[[DrivenJob], None]] = {
    fault.__name__: fault
    for fault in (
        controller,
        controller_and_worker,
        controllers_node,
        gcs,
        gcs_and_worker,
        gcs_and_controller,
        controller_stopped,
    )
}
ADOPTED = frozenset(name for name in FAULTS if name.startswith("controller") or "_contr" in name)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_each_in_random_order(cluster: LocalCluster, tmp_path: Path, strategy: str) -> None:
    """ELASTIC_FT_IN_CHARGE_TIMES: how often each (20). ELASTIC_FT_IN_CHARGE_OUT: a JSON file, for
    the figures. ELASTIC_FT_STANDBY: with ``elastic.standby``. Prints a line for each fault."""
    seed = int(os.environ.get("ELASTIC_FT_SEED", "0")) or random.randrange(1, 10**6)
    times = int(os.environ.get("ELASTIC_FT_IN_CHARGE_TIMES", "20"))
    order = [name for name in FAULTS for _ in range(times)]
    random.Random(seed).shuffle(order)
    print(f"seed {seed}: {' '.join(order)}")
    gaps: dict[str, list[float]] = {name: [] for name in FAULTS}
    backs: dict[str, list[float]] = {name: [] for name in FAULTS}
    standby = {"elastic": TWO["elastic"] | {"standby": "ELASTIC_FT_STANDBY" in os.environ}}
    values = job(f"soak-{strategy}", **TWO | {"parallel": {"strategy": strategy}} | standby)
    with DrivenJob(cluster, values, tmp_path / strategy) as run:
        run.wait_for_start(2)
        run.kill_driver()
        for name in order:
            run.wait("two workers", lambda: run.world == 2)
            run.wait_for_steps(AFTER_STEPS)
            before, pids = len(run.events("in_charge")), run.pids()
            began_s = time.time()
            FAULTS[name](run)
            if name in ADOPTED - {"controller_stopped"}:
                run.wait_for_adoption(before)
                backs[name].append(run.events("in_charge")[-1]["at_s"] - began_s)
            run.wait_for_steps(AFTER_STEPS)
            gaps[name].append(run.gap_s(began_s))
            lost = [pid for pid in pids if not alive(pid)]
            assert len(lost) == ("worker" in name), f"{name}: of {pids} ended {lost}"
        for name in FAULTS:
            report(strategy, name, gaps[name], backs[name])
        check_nothing_lost(run, [], tmp_path)
    if out := os.environ.get("ELASTIC_FT_IN_CHARGE_OUT"):
        note(Path(out), strategy, {"seed": seed, "order": order, "gap_s": gaps, "back_s": backs})


def note(path: Path, strategy: str, found: dict[str, Any]) -> None:
    """Once all was checked: nobody ended who was not to, no step was lost, losses are equal."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {strategy: found}, indent=1) + "\n")


def report(strategy: str, name: str, gaps: list[float], backs: list[float]) -> None:
    gap = f"longest gap {statistics.median(gaps):.2f} s (at most {max(gaps):.2f})" if gaps else ""
    back = f", in charge again after {statistics.median(backs):.1f} s" if backs else ""
    print(f"{strategy} {name} x{len(gaps)}: {gap}{back}")
