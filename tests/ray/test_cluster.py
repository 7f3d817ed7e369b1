"""The local cluster: its nodes die as real ones do, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.experimental import internal_kv

from elastic_ft.cli import preflight
from elastic_ft.errors import ConfigError
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for, worker_environment
from elastic_ft.hosts.ray.names import ROOT, RunNames, groups_of, reap
from elastic_ft.hosts.ray.placement_groups import Placements

pytestmark = pytest.mark.timeout(120)


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_nodes_come_and_go() -> None:
    with LocalCluster(2) as cluster:
        cluster.connect()
        head = alive_nodes() - set(cluster.node_ids)
        assert len(head) == 1
        first, second = cluster.node_ids
        third = cluster.add_node()
        assert alive_nodes() == head | {first, second, third}

        before = cluster.processes(first)
        cluster.kill_node(first)
        assert not any(p.is_running() and p.status() != "zombie" for p in before)
        wait_for(lambda: first not in alive_nodes(), 60, "the killed node is declared dead")

        cluster.kill_raylet(second)
        wait_for(lambda: second not in alive_nodes(), 60, "the node without raylet is dead")
        assert cluster.node_ids == (third,)

        family = psutil.Process().children(recursive=True)
        folder = cluster._folder
        assert Path(folder).is_dir()
    wait_for(lambda: not any(map(runs, family)), 60, "every process is gone")
    assert not Path(folder).exists()


def test_workers_spread_over_nodes_with_room() -> None:
    async def scenario() -> list[str]:
        placements = Placements("test:", {"CPU": 1}, None, workers_per_node=1)
        taken: list[str] = []
        for index in range(5):
            _, node = await placements.take(f"w{index}", [node for node in taken if node])
            taken.append(node)
        return taken

    with LocalCluster(2, cpus_per_node=2, templates=False) as cluster:
        cluster.connect()
        taken = asyncio.run(scenario())
        assert len(set(taken[:2])) == 2  # a node each
        assert sorted(taken[:4]) == sorted(2 * cluster.node_ids)  # then where there is room
        assert taken[4] == ""  # then none: it waits
        reap("test:")
        wait_for(lambda: ray.available_resources().get("CPU") == 4, 60, "all is free again")


def test_what_a_vanished_job_has_left_is_removed() -> None:
    """A group's name is known to its driver alone: it was said to be gone already, and stayed."""
    names = RunNames("vanished", "/run")
    code = (
        "import ray, sys\n"
        "from ray.util.placement_group import placement_group\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "group = placement_group([{'CPU': 1}], name=sys.argv[2], lifetime='detached')\n"
        "ray.get(group.ready())\n"
    )
    with LocalCluster(1, templates=False) as cluster:
        cluster.connect()
        place = f"{names.prefix}place/w0.1"
        driver = [sys.executable, "-c", code, cluster.address, place]
        subprocess.run(driver, env=os.environ | worker_environment(), check=True, timeout=100)
        gc = [sys.executable, "-m", "elastic_ft", "gc", "--address", cluster.address]

        def say(*options: str) -> str:
            done = subprocess.run([*gc, *options], capture_output=True, text=True, timeout=100)
            return done.stdout + done.stderr

        assert say("--dry-run") == f"would remove {place}\n"
        assert say() == f"removed {place}\n"
        wait_for(lambda: not groups_of(ROOT), 60, "it is removed")
        assert say() == "nothing is left of runs without a controller\n"


def test_a_head_that_stands_still_is_told_from_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "HEAD_TIMEOUT_S", 5.0)
    with LocalCluster(1, templates=False) as cluster:
        family = psutil.Process().children(recursive=True)
        address, head = cluster.address, next(p for p in family if p.name() == "gcs_server")
        preflight.check_address(address)
        head.suspend()
        wait_for(lambda: head.status() == psutil.STATUS_STOPPED, 30, "it stands still")
        try:
            with pytest.raises(ConfigError, match=f"who listens at {address} does not answer"):
                preflight.check_address(address)
        finally:
            head.resume()
        preflight.check_address(address)
    assert not internal_kv._internal_kv_initialized(), "a trainer would end this process"


def test_a_cluster_dies_with_its_driver() -> None:
    code = (
        "import time\n"
        "from elastic_ft.hosts.ray.cluster import LocalCluster\n"
        "cluster = LocalCluster(1)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | worker_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    family = psutil.Process(driver.pid).children(recursive=True)
    agents = [process for process in family if "Agent" in process.name()]
    others = [process for process in family if process not in agents]
    assert {"gcs_server", "raylet"} <= {process.name() for process in others}
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(map(runs, others)), 60, "every process is gone")
    for agent in agents:  # they look for the head for another minute
        agent.kill()


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_wait_for_is_bounded() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the impossible: not within 0\.1 s"):
        wait_for(lambda: False, 0.1, "the impossible")
    assert time.monotonic() - began < 5
