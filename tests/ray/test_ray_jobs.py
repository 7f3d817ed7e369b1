"""Ray's own job server: ``ray job submit -- elastic-ft run job.yaml``, and ``ray job stop``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.job_submission import JobSubmissionClient
from trial import SOON_S, START_S, job

from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import ROOT, actors_of
from elastic_ft.observe.run_reader import RunReader

pytest.importorskip("aiohttp_cors", reason="needs ray[default]")
pytest.importorskip("opencensus", reason="needs ray[default]")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalCluster]:
    with LocalCluster(2, dashboard=True) as cluster:
        cluster.connect()
        yield cluster


def dashboard(server: LocalCluster) -> str:
    return f"http://{server._head.webui_url}"


def ray_job(server: LocalCluster, verb: str, *words: object) -> str:
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", verb]
    address = ["--address", dashboard(server)]
    ended = subprocess.run(
        [*command, *address, *map(str, words)], capture_output=True, text=True, timeout=START_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def submitted(server: LocalCluster, id: str, folder: Path, **sections: Any) -> RunReader:
    file, run = folder / f"{id}.yaml", folder / id
    elastic = {"min_workers": 1, "max_workers": 2}
    file.write_text(yaml.safe_dump(job(id, elastic=elastic, **sections)))
    entry = [sys.executable, "-m", "elastic_ft", "run", file, "--out", run]
    ray_job(server, "submit", "--submission-id", id, "--no-wait", "--", *entry)
    return RunReader(run)


def test_a_job_of_ray_s_job_server_is_done(server: LocalCluster, tmp_path: Path) -> None:
    run = submitted(server, "short", tmp_path, steps=10)
    wait_for(lambda: bool(run.result()), START_S, "it is done")
    assert run.result()["status"] == "completed"
    asked = JobSubmissionClient(dashboard(server))
    wait_for(lambda: asked.get_job_status("short").is_terminal(), SOON_S, "Ray knows")
    assert asked.get_job_status("short") == "SUCCEEDED"
    assert "completed: 10 steps" in asked.get_job_logs("short")


def test_a_job_that_is_stopped_there_leaves_a_checkpoint_of_its_last_step(
    server: LocalCluster, tmp_path: Path
) -> None:
    run = submitted(server, "long", tmp_path, checkpoint={"every_steps": 5})
    wait_for(lambda: any(saved(run)), START_S, "it has a checkpoint")
    ray_job(server, "stop", "--no-wait", "long")
    asked = JobSubmissionClient(dashboard(server))
    wait_for(lambda: asked.get_job_status("long") == "STOPPED", SOON_S, "Ray has stopped it")
    assert "till then the newest checkpoint is of step" in asked.get_job_logs("long")
    wait_for(lambda: bool(run.result()), SOON_S, "so has the job, beyond its grace if need be")
    assert run.result()["status"] == "stopped"
    assert max(saved(run)) == run.steps()[-1]["step"]
    wait_for(lambda: not actors_of(ROOT), SOON_S, "nothing of it is left on the cluster")


def saved(run: RunReader) -> list[int]:
    return [line["step"] for line in run.events() if line["event"] == "checkpoint_committed"]
