"""A run folder in a mount that hangs while a job runs: really, a frozen disk."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.train import RunConfig
from trial import START_S, Trial, job

from elastic_ft.core.invariants import Expected
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.observe import scratch
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import mounts
from tests.hanging import Disk, disk, needs_root

pytestmark = [needs_root, pytest.mark.timeout(600)]
FROZEN_STEPS = 20  # committed by those who are left


@pytest.fixture
def mount(cluster: LocalCluster) -> Iterator[Disk]:
    """Where the cluster's processes were told that one may hang."""
    point = Path(os.environ[mounts.NAMED])
    with disk(point.parent) as made:
        assert made.point == point
        yield made


class Hidden(Trial):
    """Its run folder is a mirror, that stands still with its disk: what is written by then lies on
    the controller's own."""

    def find(self, cluster: LocalCluster) -> None:
        wait_for(lambda: self._lies_at(cluster) is not None, START_S, "a controller's folder")
        folder = self._lies_at(cluster)
        assert folder is not None
        self.folder = folder

    def _lies_at(self, cluster: LocalCluster) -> Path | None:
        try:
            pid = cluster.controller_pid()
        except ProcessLookupError:
            return None
        for owner in Path(tempfile.gettempdir()).glob(f"elastic_ft_run_*/{scratch.OWNER}"):
            if json.loads(owner.read_text() or "{}").get("pid") == pid:
                return owner.parent
        return None


def test_a_worker_is_lost_while_the_run_folder_hangs(mount: Disk, cluster: LocalCluster) -> None:
    """And replaced; whoever reads the folder, once that can be written to, sees all of it."""
    elastic = {"min_workers": 1, "max_workers": 2, "gather_s": 60}
    values = job("frozen", elastic=elastic, parallel={"strategy": "fsdp"})
    values["checkpoint"] = {"every_steps": 5}
    config = RunConfig(name="frozen", storage_path=str(mount.point))
    run = RunReader(mount.point / "frozen")
    trial = Hidden(ElasticTrainer(values, run_config=config), mount.point / "frozen")
    try:
        trial.find(cluster)
        trial.wait_for_world(2, timeout_s=START_S)
        trial.wait("keepers", lambda: len(trial.events("keeper_ready")) == 2)
        trial.wait("a checkpoint", lambda: bool(trial.events("checkpoint_committed")))
        mount.freeze()
        victim = trial.members()[1]
        (survivor,) = trial.pids() - {victim["pid"]}
        os.kill(victim["pid"], signal.SIGKILL)
        assert trial.wait_for_generation(1) == {survivor}
        trial.wait_for_world(2, FROZEN_STEPS, START_S)
        assert mount.thaw(), "it was frozen till then"
        assert survivor in trial.pids()
        result = trial.stop()
        assert result.error is None and result.checkpoint is not None
    finally:
        mount.thaw()
        trial.abandon()
    events = run.events()
    assert [line["seq"] for line in events] == [*range(len(events))]
    recovered = next(line for line in events if line["event"] == "recovered")
    assert (recovered["cause"], recovered["steps_lost"]) == ("worker_lost", 0)
    assert run.violations(Expected(seed=0, global_batch_size=8)) == []
