"""Eight workers on four nodes, in three dimensions: a node goes, another layout goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from trial import START_S, Trial, job

from elastic_ft.hosts.ray.cluster import LocalCluster

Start = Callable[..., Trial]
# In CI test_moves goes through such changes when nodes of two workers are lost, and test_elastic
# loses nodes of Ray's.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(4, cpus_per_node=2) as cluster:
        cluster.connect()
        yield cluster


def test_a_node_of_a_3d_job_is_lost_and_replaced(start: Start, cluster: LocalCluster) -> None:
    trial = start(
        job(
            "3d",
            batch={"global_batch_size": 8, "micro_batch_size": 1},
            parallel={"tp": 2, "pp": 2},
            elastic={"min_workers": 2, "max_workers": 8, "workers_per_node": 2, "gather_s": 120}
            | {"multiple_of": 2},  # stages may be given up
        )
    )
    trial.wait_for_world(8, timeout_s=START_S)
    assert trial.events("generation_formed")[-1]["layout"] == "pp2-ddp2-tp2"
    members = trial.members()
    victim = members[0]["node"]
    survivors = {m["pid"] for m in members if m["node"] != victim}
    cluster.kill_node(victim)
    trial.wait_for_world(6, timeout_s=START_S)
    assert trial.events("generation_formed")[-1]["layout"] == "ddp3-tp2"
    assert trial.pids() == survivors
    cluster.add_node()
    trial.wait_for_world(8, timeout_s=START_S)
    assert trial.events("generation_formed")[-1]["layout"] == "pp2-ddp2-tp2"
    assert survivors < trial.pids()
    trial.stop()
    assert sum(line["steps_lost"] for line in trial.events("recovered")) == 0
    trial.check()
