"""One four-node cluster for all that have none of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.train import RunConfig
from trial import NODES, Trial

from elastic_ft.hosts.ray import worker_actor
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.storage import mounts

# Before the nodes start: their workers import the tests' train loops from here.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process is a driver of one cluster at a time: those with their own come first."""
    items.sort(key=lambda item: "four_nodes" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    may_hang = tmp_path_factory.mktemp("mounts") / "disk"  # of tests that make one there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(mounts.NAMED, str(may_hang))
        with LocalCluster(NODES) as cluster:
            cluster.connect()
            yield cluster
    wait_for(lambda: not left_of_ray(), 30, "no process of Ray's is left")


@pytest.fixture(scope="module")
def cluster(four_nodes: LocalCluster) -> LocalCluster:
    """Modules may have another one in its place."""
    return four_nodes


def left_of_ray() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray" in process.name():
                found.append(process)
    return found


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """Starts a job on a cluster of four live nodes; ends it with the test."""
    while len(cluster.node_ids) < NODES:
        cluster.add_node()
    trials: list[Trial] = []

    def begin(
        values: dict[str, Any], loop: Any = None, callbacks: Any = None, **kwargs: Any
    ) -> Trial:
        config = RunConfig(name=values["name"], storage_path=str(tmp_path), callbacks=callbacks)
        if loop is not None:
            trainer = ElasticTrainer(loop, job=values, run_config=config, **kwargs)
        else:
            trainer = ElasticTrainer(values, run_config=config, **kwargs)
        trials.append(Trial(trainer, tmp_path / values["name"]))
        return trials[-1]

    yield begin
    for trial in trials:
        trial.abandon()


@pytest.fixture
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are made here ask no cluster for their GPU, and leave this process's environment
    as it is."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    monkeypatch.setattr(worker_actor, "_own_gpu", lambda worker: {})
    monkeypatch.setattr(worker_actor, "_make_room", lambda values: None)
