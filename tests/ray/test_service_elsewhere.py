"""The service where neither nodes nor folder are its own: Ray's autoscaler starts and ends nodes;
all that it and its jobs know is in S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from autoscaled import AutoscaledCluster
from trial import SOON_S, START_S, job

from chaos.s3_server import S3Server, s3_server
from elastic_ft import Client
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.observe.run_reader import RunReader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
REMOTE_S = 60.0  # what a remote run folder shows is some seconds old
Job = dict[str, Any]


def said_by(*words: object) -> subprocess.CompletedProcess[str]:
    """``elastic-ft``, in a process of its own: this one is no driver."""
    return subprocess.run(
        [sys.executable, "-m", "elastic_ft", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=START_S,
    )


def command(*words: object) -> str:
    """Returns what it prints."""
    done = said_by(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(address: str, folder: object, config: Path | None = None) -> Client:
    more = ("--config", config) if config else ()
    words = ("--address", address, "--folder", folder, "--port", 0, *more)
    return Client(command("service", "start", *words).split()[-1], away_s=SOON_S)


def until(client: Client, id: str, what: str, condition: Callable[[Job], object]) -> Job:
    found: Job = {}

    def holds() -> bool:
        found.update(client.status(id))
        return bool(condition(found))

    try:
        wait_for(holds, START_S, what)
    except TimeoutError:
        print(found, *client.events(id), sep="\n")
        raise
    return found


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_job_of_a_service_in_s3_loses_nothing(s3: S3Server) -> None:
    """A worker is killed, the service is killed, is stopped, and is started again."""
    folder = s3.url("service")
    with LocalCluster(2) as cluster:
        client = started(cluster.address, folder)
        elastic = {"min_workers": 1, "max_workers": 2}
        one = client.submit(job("one", elastic=elastic))["id"]
        before = until(client, one, "two train", lambda j: j["step"] >= 5 and j["generation"])
        assert before["run_folder"] == f"{folder}/jobs/{one}"
        os.kill(before["members"][-1]["pid"], signal.SIGKILL)
        until(client, one, "it goes on", lambda j: j["generation"] > before["generation"])

        about = client.service()
        os.kill(about["pid"], signal.SIGKILL)
        again = client.service()
        assert (again["starts"], again["folder"]) == (about["starts"] + 1, folder)
        step = client.status(one)["step"]
        until(client, one, "it trains on", lambda j: j["step"] > step)

        command("service", "stop", "--service", client.url)
        client = started(cluster.address, folder)
        assert [j["id"] for j in client.jobs()] == [one]
        step = client.status(one)["step"]
        until(client, one, "it trains still", lambda j: j["step"] > step)
        recovered = [e for e in client.events(one) if e["event"] == "recovered"]
        assert recovered[0]["cause"] == "worker_lost", recovered
        assert [e["steps_lost"] for e in recovered] == [0] * len(recovered), recovered
        client.stop(one)
        assert client.wait(one, START_S)["state"] == "stopped"
        command("service", "stop", "--service", client.url)
    run = RunReader(f"{folder}/jobs/{one}")
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > step
    assert run.result()["status"] == "stopped"


def test_a_second_cluster_takes_no_living_services_folder_unless_told(tmp_path: Path) -> None:
    """It would start the jobs that run on the first one again."""
    folder = tmp_path / "F"
    with LocalCluster(1) as here, LocalCluster(1) as elsewhere:
        first = started(here.address, folder)
        one = first.submit(job("one"))["id"]
        before = until(first, one, "it trains", lambda j: j["step"] >= 3)
        words = ("service", "start", "--address", elsewhere.address, "--folder", folder)
        refused = said_by(*words, "--port", 0)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        (line,) = (refused.stdout + refused.stderr).strip().splitlines()
        assert f"alive at {first.url}" in line and "--take-over" in line
        after = first.status(one)
        assert (after["members"], after["generation"]) == (before["members"], before["generation"])

        second = Client(command(*words, "--port", 0, "--take-over").split()[-1], away_s=SOON_S)
        step, old = after["step"], {m["node"] for m in before["members"]}

        def trains_there(job: Job) -> bool:
            nodes = {m["node"] for m in job["members"]}
            return bool(nodes) and nodes.isdisjoint(old) and job["step"] > step

        until(second, one, "it trains there", trains_there)
        assert [j["id"] for j in second.jobs(all=True)] == [one]
        second.stop(one)
        assert second.wait(one, START_S)["state"] == "stopped"
        command("service", "stop", "--service", second.url)
        steps = [line["step"] for line in RunReader(f"{folder}/jobs/{one}").steps()]
        assert steps[:step] == list(range(1, step + 1))


@pytest.mark.parametrize("version", [1, 2])
def test_rays_autoscaler_starts_the_nodes_of_a_job_and_ends_them(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("autoscaler: true\n")
    cluster = AutoscaledCluster(3, 5.0, version, monkeypatch)
    try:
        client = started(cluster.address, tmp_path / "F", tmp_path / "config.yaml")
        assert client.service()["nodes"] == []
        elastic = {"min_workers": 2, "max_workers": 2}
        id = client.submit(job("wide", steps=30, elastic=elastic))["id"]
        try:
            seen = until(client, id, "it trains", lambda j: j["step"] >= 3)
        except TimeoutError:
            print(cluster.log())
            raise
        assert len({member["node"] for member in seen["members"]}) == 2
        assert len(cluster.raylets()) == 2
        assert client.service()["asked_of_autoscaler"] == []  # nothing is missing
        assert client.wait(id, START_S)["state"] == "completed"
        wait_for(lambda: not client.service()["nodes"], REMOTE_S, "the nodes are returned")
        wait_for(lambda: not cluster.raylets(), REMOTE_S, "they have ended")
        command("service", "stop", "--service", client.url)
    finally:
        cluster.close()
