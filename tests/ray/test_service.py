"""The service, on a cluster of its own: nothing dies with a terminal, or with the service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from trial import SOON_S, job

from elastic_ft import Client
from elastic_ft.cli.app import run_command
from elastic_ft.errors import ConfigError
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.names import ROOT, RunNames, actors_of, end_actor
from elastic_ft.observe.run_reader import RunReader
from tests.browser import LivePage, opened

pytestmark = pytest.mark.timeout(280)
START_S = 150.0  # cold processes on two shared cores


class Desk:
    """A terminal: commands, and what they print."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.client = Client(away_s=SOON_S)  # a service that was killed starts anew, cold

    def run(self, *words: object, code: int = 0) -> str:
        self._capfd.readouterr()
        found = run_command([str(word) for word in words])
        out, err = self._capfd.readouterr()
        assert found == code, out + err
        return out + err

    def job_file(self, name: str, **sections: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job(name, **sections)))
        return path

    def until(
        self, id: str, what: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        until_s = time.monotonic() + timeout_s
        while not condition(found := self.client.status(id)):
            if time.monotonic() > until_s:
                log = self.folder / "F" / "local-nodes.log"
                pytest.fail(f"{what}: {json.dumps(found, indent=1)}\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        return found


@pytest.mark.soak
def test_who_can_not_shrink_is_suspended_and_goes_on(
    cluster: LocalCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a cluster that is there already, by its address."""
    (tmp_path / "config.yaml").write_text("cooldown_s: 0.5\n")
    words = ("service", "start", "--address", cluster.address, "--folder", tmp_path / "F")
    started = subprocess.run(
        [sys.executable, "-m", "elastic_ft", *map(str, words), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    monkeypatch.setenv("ELASTIC_FT_SERVICE", started.stdout.split()[-1])
    desk = Desk(tmp_path, capfd)
    whole = desk.client.submit(job("whole", elastic={"min_workers": 4, "max_workers": 4}))["id"]
    desk.until(whole, "it trains", lambda j: j["step"] >= 5, START_S)
    short = job("urgent", steps=30, elastic={"min_workers": 1, "max_workers": 1})
    urgent = desk.client.submit(short, priority=1)["id"]
    waits = desk.until(whole, "it is suspended", lambda j: j["state"] == "suspended", SOON_S)
    assert f"suspended for {urgent} (priority 1)" in waits["decisions"][-1]["why"]
    desk.until(urgent, "the urgent one is done", lambda j: j["state"] == "completed", START_S)
    left_at = desk.client.status(whole)["checkpoint"]["step"]
    assert left_at >= 5
    again = desk.until(whole, "it goes on", lambda j: j["step"] > left_at, START_S)
    assert again["state"] == "running"
    steps = [line["step"] for line in RunReader(tmp_path / "F/jobs" / whole).steps()]
    assert steps == list(range(1, len(steps) + 1))  # none twice, none left out
    desk.run("service", "stop", "--jobs", "stop")
    wait_for(lambda: not actors_of(ROOT), SOON_S, "nothing of the jobs is left")


@pytest.fixture
def desk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "config.yaml").write_text("cooldown_s: 0.5\n")
    words = ("service", "start", "--local-nodes", 2, "--folder", tmp_path / "F", "--port", 0)
    code = run_command([str(word) for word in (*words, "--config", tmp_path / "config.yaml")])
    assert code == 0, (tmp_path / "F" / "local-nodes.log").read_text()
    monkeypatch.setenv(
        "ELASTIC_FT_SERVICE", json.loads((tmp_path / "F/service.json").read_text())["url"]
    )
    pid = json.loads((tmp_path / "F/local-nodes.json").read_text())["pid"]
    yield Desk(tmp_path, capfd)
    if (tmp_path / "F/local-nodes.json").exists():
        os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + SOON_S
        while (tmp_path / "F/local-nodes.json").exists() and time.monotonic() < until_s:
            time.sleep(0.05)


def test_an_urgent_job_shrinks_another_and_the_service_may_die(desk: Desk) -> None:
    text = desk.run("submit", desk.job_file("long", elastic={"min_workers": 1, "max_workers": 2}))
    first, page = text.split()
    assert first == "long-1" and page.endswith("/jobs/long-1")
    before = desk.until(first, "it trains", lambda j: j["step"] >= 3, START_S)
    assert before["state"] == "running" and before["workers"]["now"] == 2

    # Urgent work: the other one shrinks in place.
    elastic = {"min_workers": 1, "max_workers": 1}
    text = desk.run("submit", desk.job_file("urgent", elastic=elastic), "--priority", 10)
    urgent = text.split()[0]
    shrunk = desk.until(first, "it shrinks", lambda j: j["workers"]["now"] == 1, SOON_S)
    assert shrunk["members"][0]["pid"] in {member["pid"] for member in before["members"]}
    assert "gave 1 worker to job urgent-2" in shrunk["decisions"][-1]["why"]

    desk.until(urgent, "the urgent one trains", lambda j: j["step"] >= 3, START_S)

    # The service is killed, and is itself again at the same place.
    about = desk.client.service()
    os.kill(about["pid"], signal.SIGKILL)
    again = desk.client.service()
    assert again["starts"] == about["starts"] + 1 and again["folder"] == about["folder"]
    assert [job["id"] for job in desk.client.jobs()] == [first, urgent]
    step = desk.client.status(urgent)["step"]
    desk.until(urgent, "it trains on", lambda j: j["step"] > step, SOON_S)

    assert urgent in desk.run("jobs")
    assert "rank 0" in (told := desk.run("status", urgent)) and ", loss " in told
    assert "generation 1" in desk.run("events", urgent)
    assert "no job nosuch" in desk.run("status", "nosuch", code=2)
    assert "2 of 2 slots used" in desk.run("service", "status")

    # What is bad is refused, one line, and leaves nothing behind.
    bad = desk.folder / "bad.yaml"
    bad.write_text(yaml.safe_dump(job("bad", modle={})))
    assert "modle: unknown key" in desk.run("submit", bad, code=2)
    with pytest.raises(ConfigError, match="there is no queue fast"):
        desk.client.submit(job("tiny"), queue="fast")

    # The urgent one ends, and the other grows back; it has lost nothing.
    assert "stopped" in desk.run("stop", urgent)
    grown = desk.until(first, "it grows back", lambda j: j["workers"]["now"] == 2, START_S)
    assert grown["members"][0]["pid"] == shrunk["members"][0]["pid"]
    recovered = [e for e in desk.client.events(first) if e["event"] == "recovered"]
    assert [e["steps_lost"] for e in recovered] == [0, 0]

    with opened() as browser:
        if browser is not None:
            resize_by_hand(browser, page)
    assert desk.client.status(first)["members"][0]["pid"] == shrunk["members"][0]["pid"]

    desk.run("service", "stop", "--jobs", "stop")
    assert RunReader(desk.folder / "F/jobs" / first).result()["status"] == "stopped"
    assert not (desk.folder / "F/local-nodes.json").exists()


@pytest.mark.soak  # six processes import at once: on busy cores that has taken START_S
def test_a_job_that_starts_as_the_service_is_killed_starts(desk: Desk) -> None:
    one = desk.run("submit", desk.job_file("one")).split()[0]
    desk.until(one, "it starts", lambda j: j["state"] == "starting", SOON_S)
    os.kill(desk.client.service()["pid"], signal.SIGKILL)
    desk.until(one, "it trains", lambda j: j["step"] >= 3, START_S)
    desk.run("service", "stop", "--jobs", "stop")


@pytest.mark.soak
def test_a_job_whose_controller_is_killed_for_good_goes_on(desk: Desk) -> None:
    """From what its keepers have saved: no step is lost that was committed."""
    one = desk.run("submit", desk.job_file("one")).split()[0]
    desk.until(one, "it trains", lambda j: j["step"] >= 5, START_S)
    ray.init(json.loads((desk.folder / "F/local-nodes.json").read_text())["address"])
    try:
        end_actor(RunNames("one", str(desk.folder / "F/jobs" / one)).controller)
    finally:
        ray.shutdown()
    lost = desk.until(
        one, "it starts again", lambda j: "start again" in [d["what"] for d in j["decisions"]], 60
    )
    assert "its controller is gone" in lost["decisions"][-2]["why"]
    assert "its controller is gone" in desk.run("status", one)
    again = desk.until(
        one, "it goes on", lambda j: j["state"] == "running" and j["step"] > lost["step"], START_S
    )
    resumed = [world["step"] for world in again["world"]]
    assert resumed[0] == 0 and resumed[-1] >= lost["step"] - 1, resumed
    steps = [line["step"] for line in RunReader(desk.folder / "F/jobs" / one).steps()]
    assert steps == list(range(1, len(steps) + 1))
    desk.run("service", "stop", "--jobs", "stop")


def resize_by_hand(browser: Any, url: str) -> None:
    """On the page of a job of two workers: steps arrive, and a button takes one worker away."""
    live = LivePage(browser, url)
    live.until("it is drawn", lambda: live.points() > 0)
    step = live.step()
    live.until("steps arrive", lambda: live.step() > step)
    assert "2 of 1 to 2" in live.text(".tiles")
    live.page.get_by_role("spinbutton", name="Workers").fill("1")
    assert "with 1 worker at most, instead of 2?" in live.press("Resize")
    live.until("it is resized", lambda: "1 of 1 to 2" in live.text(".tiles"))
    assert live.fits and live.wrong == []
    live.close()
