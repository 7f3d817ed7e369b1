"""Whoever is in charge of a job may die: workers keep their processes and train on.

Controllers run off the head here, as on a fleet, and the GCS is back from its own disk.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from in_charge import (
    AFTER_STEPS,
    READY_S,
    TWO,
    DrivenJob,
    alive,
    check_nothing_lost,
    stopped,
    two_and_two,
)
from trial import job

from elastic_ft.hosts.ray import fork_server
from elastic_ft.hosts.ray.cluster import LocalCluster
from elastic_ft.hosts.ray.controller_place import LABEL

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with two_and_two() as cluster:
        yield cluster


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


def test_driver_and_gcs_stand_still(cluster: LocalCluster, tmp_path: Path) -> None:
    """Stopped, and not dead: nobody sees an end of theirs. The controller's does not wait for the
    driver that has started it."""
    with DrivenJob(cluster, job("still", **TWO), tmp_path / "still") as run:
        run.wait_for_start(2)
        pids = run.pids()
        with run.driver_stopped():
            run.wait_for_steps(AFTER_STEPS)
            with stopped(cluster.gcs_pid()):
                run.wait_for_steps(AFTER_STEPS)
            before = len(run.events("in_charge"))
            run.kill_controller()
            run.wait_for_adoption(before)
        assert len(run.events("generation_formed")) == 1
        check_nothing_lost(run, pids, tmp_path)


def test_controllers_node_and_a_worker_are_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    """The run folder is on a disk that the others see; another node is ready for the next one."""
    values = job("both", **TWO | {"elastic": TWO["elastic"] | {"standby": True}})
    with DrivenJob(cluster, values, tmp_path / "both") as run:
        run.wait_for_start(2)
        run.wait("standbys", lambda: len(run.ready_standbys()) == 2, READY_S)
        before = len(run.events("in_charge"))
        run.kill_controllers_node()
        victim = run.kill_worker(1)
        (survivor,) = set(run.pids()) - {victim}
        run.wait_for_adoption(before)
        run.wait("the survivor trains", lambda: run.pids()[0] == survivor or len(run.pids()) == 2)
        assert survivor in run.pids() and victim not in run.pids()
        parent = psutil.Process(cluster.controller_pid()).parent()
        assert parent is not None and fork_server.__name__ in parent.cmdline()
        node = cluster.add_node(cpus=0, labels={LABEL: "true"})
        run.wait("another standby", lambda: node in run.ready_standbys(), READY_S)
        check_nothing_lost(run, [survivor], tmp_path)
        assert {line["steps_lost"] for line in run.events("recovered")} == {0}


@pytest.mark.soak
def test_a_first_report_needs_no_gcs(cluster: LocalCluster, tmp_path: Path) -> None:
    """Of a checkpoint. Drivers have a core each to themselves while there is no GCS (Ray's way to
    wait for it), so that steps are slow on two."""
    values = job("reports", **TWO | {"checkpoint": {"every_steps": 20}})
    with DrivenJob(cluster, values, tmp_path / "reports") as run:
        run.wait_for_start(2)
        pids = run.pids()
        cluster.kill_gcs()
        assert run.step < 20, "it has reported by now"
        run.wait("a step after its first report", lambda: run.step > 21)
        cluster.restart_gcs()
        check_nothing_lost(run, pids, tmp_path)
