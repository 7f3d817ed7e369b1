"""Real nodes, real signals: what becomes of a job when its workers and nodes come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from trial import START_S, Trial, job

from elastic_ft.cli.resize import resize
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for

Start = Callable[..., Trial]
pytestmark = pytest.mark.timeout(600)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_killed_worker_is_replaced(start: Start, cluster: LocalCluster) -> None:
    """FSDP2 without buddies: nobody but the keeper of its node has the dead worker's shard."""
    snapshot = {"every_steps": 1, "copies": 1}
    trial = start(job("worker", parallel={"strategy": "fsdp"}, snapshot=snapshot))
    trial.wait_for_world(4, timeout_s=START_S)
    trial.wait("four keepers", lambda: len(trial.events("keeper_ready")) == 4)
    victim = trial.members()[1]
    survivors = trial.pids() - {victim["pid"]}
    for pid in trial.pids():  # since its beginning: glibc reads it then
        assert b"MALLOC_ARENA_MAX=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert cluster.node_of_pid(victim["pid"]) == victim["node"]
    assert cluster.raylet_pid(victim["node"]) == victim["raylet_pid"]
    os.kill(victim["pid"], signal.SIGKILL)
    assert trial.wait_for_generation(3) == survivors
    trial.wait_for_world(4, timeout_s=START_S)
    assert survivors < trial.pids()
    result = trial.stop()
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["world_size"] == 4
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "manifests").is_dir()
    recovery = trial.events("recovered")[0]
    assert (recovery["cause"], recovery["steps_lost"]) == ("worker_lost", 0)
    assert recovery["source"] == "keeper"
    trial.check()


def test_stopped_worker_is_killed_and_replaced(start: Start) -> None:
    elastic = {"max_workers": 3, "gather_s": 60, "heartbeat_timeout_s": 3}
    trial = start(job("stopped", elastic=elastic))
    trial.wait_for_world(3, timeout_s=START_S)
    victim = trial.members()[2]
    os.kill(victim["pid"], signal.SIGSTOP)
    trial.wait_for_generation(2)
    trial.wait("the stopped worker is killed", lambda: not alive(victim["pid"]))
    trial.wait_for_world(3, timeout_s=START_S)
    trial.stop()
    assert [line["worker"] for line in trial.events("worker_hung")] == [victim["worker"]]
    trial.check()


def test_lost_node_and_its_successor(start: Start, cluster: LocalCluster) -> None:
    snapshot = {"every_steps": 1, "domain_label": "rack"}
    trial = start(job("node", parallel={"strategy": "fsdp"}, snapshot=snapshot))
    trial.wait_for_world(4, timeout_s=START_S)
    victim = trial.members()[2]
    survivors = trial.pids() - {victim["pid"]}
    cluster.kill_node(victim["node"])
    trial.wait_for_world(3)
    trial.wait("the node is declared lost", lambda: bool(trial.events("node_lost")))
    successor = cluster.add_node(labels={"rack": "another"})
    trial.wait_for_world(4, timeout_s=START_S)
    domains = {member["node"]: member["domain"] for member in trial.members()}
    assert domains[successor] == "another"
    assert list(domains.values()).count("another") == 1
    assert survivors < trial.pids()
    trial.stop()
    lost = trial.events("recovered")[0]
    assert (lost["world_before"], lost["world_after"], lost["steps_lost"]) == (4, 3, 0)
    assert [line["node"] for line in trial.events("node_lost")] == [victim["node"]]
    trial.check()


def test_killed_raylet_takes_its_worker_along(start: Start, cluster: LocalCluster) -> None:
    elastic = {"max_workers": 2, "gather_s": 60}
    trial = start(job("raylet", elastic=elastic))
    trial.wait_for_world(2, timeout_s=START_S)
    victim = trial.members()[1]
    cluster.kill_raylet(victim["node"])
    trial.wait("its worker exits", lambda: not alive(victim["pid"]))
    trial.wait_for_world(2, timeout_s=START_S)  # on a node that was idle
    trial.stop()
    trial.check()


@pytest.mark.soak  # in CI on plain processes: multiproc/test_world.py
def test_two_nodes_at_once(start: Start, cluster: LocalCluster) -> None:
    """Sharded state survives the loss of both holders of a shard: from the checkpoint."""
    checkpoint = {"every_steps": 10}
    values = job("two", parallel={"strategy": "fsdp"}, checkpoint=checkpoint)
    trial = start(values)
    trial.wait_for_world(4, timeout_s=START_S)
    trial.wait("a checkpoint", lambda: bool(trial.events("checkpoint_committed")))
    for member in trial.members()[1:3]:
        cluster.kill_node(member["node"])
    trial.wait_for_world(2)
    for _ in range(2):
        cluster.add_node()
    trial.wait_for_world(4, timeout_s=START_S)
    trial.stop()
    assert {line["source"] for line in trial.events("recovered")} <= {"live", "peer", "checkpoint"}
    trial.check()


def test_drained_node_is_left_in_time(start: Start, cluster: LocalCluster) -> None:
    trial = start(job("drain", parallel={"strategy": "fsdp"}))
    trial.wait_for_world(4, timeout_s=START_S)
    victim = trial.members()[0]
    deadline_s = time.time() + 60
    arguments = ["--within", "60", "--node", victim["node"], "--address", cluster.address]
    command = [sys.executable, "-m", "elastic_ft", "drain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)  # as a pod's preStop
    assert done.returncode == 0 and "no worker is left on node" in done.stdout, done
    trial.wait_for_world(3)
    assert time.time() < deadline_s
    draining = trial.events("node_draining")[0]
    assert draining["node"] == victim["node"]
    assert draining["deadline_s"] == pytest.approx(deadline_s, abs=30)
    trial.wait("its worker is gone", lambda: not alive(victim["pid"]))
    cluster.add_node()
    trial.wait_for_world(4, timeout_s=START_S)
    trial.stop()
    assert trial.events("worker_lost") == []
    recovery = trial.events("recovered")[0]
    assert (recovery["cause"], recovery["steps_lost"]) == ("node_draining", 0)
    trial.check()


def test_all_workers_killed(start: Start) -> None:
    """Their nodes live: under DDP, too, one of the keepers has the state."""
    elastic = {"max_workers": 2, "gather_s": 60}
    trial = start(job("all", elastic=elastic, checkpoint={"every_steps": 10}))
    trial.wait_for_world(2, timeout_s=START_S)
    trial.wait("a checkpoint", lambda: bool(trial.events("checkpoint_committed")))
    trial.wait("both keepers", lambda: len(trial.events("keeper_ready")) >= 2)
    trial.wait_for_world(2, steps=2)  # its own step may come from either
    for pid in trial.pids():
        os.kill(pid, signal.SIGKILL)
    trial.wait("suspended", lambda: bool(trial.events("suspended")))
    trial.wait_for_world(2, timeout_s=START_S)
    trial.stop()
    suspended = trial.events("suspended")[0]
    resumed = next(g for g in trial.events("generation_formed") if g["seq"] > suspended["seq"])
    assert (resumed["source"], trial.events("rolled_back")) == ("keeper", [])
    trial.check()


def test_nothing_is_left_in_the_cluster(cluster: LocalCluster) -> None:
    """After all of the above: no actor and no placement group holds anything."""

    def free() -> bool:
        states = {entry["state"] for entry in placement_group_table().values()}
        return (
            states <= {"REMOVED"}
            and ray.available_resources().get("CPU") == (ray.cluster_resources()["CPU"])
        )

    wait_for(free, 60, "everything is freed")


def test_resized_while_it_runs(start: Start) -> None:
    """By the command: who is not wanted leaves at a boundary, and its resources are free again."""
    elastic = {"min_workers": 1, "max_workers": 3, "gather_s": 60}
    trial = start(job("resized", parallel={"strategy": "fsdp"}, elastic=elastic))
    trial.wait_for_world(3, timeout_s=START_S)
    first = trial.pids()
    assert resize(str(trial.folder), 2, START_S) == 0
    (released,) = first - trial.pids()
    trial.wait("the released worker exits", lambda: not alive(released))
    trial.wait("its resources are free", lambda: len(reserved()) == 2)
    assert resize(str(trial.folder), 3, START_S) == 0
    assert len(trial.pids() & first) == 2
    trial.stop()
    causes = [(line["cause"], line["steps_lost"]) for line in trial.events("recovered")]
    assert causes == [("resized", 0), ("worker_joined", 0)]
    assert trial.events("worker_lost") == []
    trial.check()


def reserved() -> list[str]:
    """Names of the placement groups that hold resources."""
    groups = placement_group_table().values()
    return [group["name"] for group in groups if group["state"] == "CREATED"]
