"""A service that takes connections and answers nothing, as its clients see it: its process is
stopped. Each of them says so in time; once it goes on, all is done once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import FAILED, run_command
from elastic_ft.service import service_client
from elastic_ft.service.service_client import Client, ServiceAway
from tests.browser import LivePage
from tests.oneproc.served import JOB, WAIT_S, ServedApart
from tests.waiting import until

QUICK = "const slow = AbortSignal.timeout; AbortSignal.timeout = (ms) => slow(ms / 20);"


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(service_client.VARIABLE, raising=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApart]:
    served = ServedApart(tmp_path / "F")
    yield served
    served.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApart]:
    """One that stands still all the while."""
    served = ServedApart(tmp_path_factory.mktemp("standing") / "F")
    served.stand_still()
    yield served
    served.close()


def test_of_a_submission_that_met_silence_it_is_said_that_it_may_be_done(
    served: ServedApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that no service answers, and was taken in once the service went on."""
    served.stand_still()
    with monkeypatch.context() as patch:
        patch.setattr(service_client, "TIMEOUT_S", 0.3)
        with pytest.raises(ServiceAway, match="look at the jobs before you submit it again"):
            Client(served.url, away_s=0.0).submit(JOB)
        with pytest.raises(ServiceAway, match="it may be done all the same"):
            Client(served.url, away_s=0.0).set_priority("tiny-1", 1)
    served.go_on()
    until(Client(served.url).jobs, "the service has taken it in", 10)


def test_a_submission_that_met_silence_is_asked_for_again_and_done_once(
    served: ServedApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_client, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(service_client, "TOLD_S", 0.05)
    waits = threading.Event()
    served.stand_still()
    client = Client(served.url, away_s=WAIT_S, waiting=lambda _: waits.set())
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(client.submit, JOB)
        assert waits.wait(WAIT_S)
        served.go_on()
        assert job.result(WAIT_S)["id"] == "tiny-1"
    assert [job["id"] for job in client.jobs(all=True)] == ["tiny-1"]


@pytest.mark.parametrize(
    "command",
    [
        ["jobs"],
        ["submit", "job.yaml"],
        ["stop", "a-1"],
        ["events", "a-1", "--follow"],
        ["logs", "a-1", "--follow"],
        ["service", "status"],
        ["service", "stop"],
    ],
)
def test_a_command_says_in_time_that_the_service_stands_still(
    standing: ServedApart,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: a\n")
    for name, value in (("TIMEOUT_S", 0.5), ("SLOW_S", 0.05), ("AWAY_S", 0.1)):
        monkeypatch.setattr(service_client, name, value)
    assert run_command([*command, "--service", standing.url]) == FAILED
    *waiting, failed = capfd.readouterr().err.splitlines()
    assert waiting == [f"waiting for an answer of the service at {standing.url}"]
    silent = f"elastic-ft: who listens at {standing.url} does not answer: it may stand still"
    assert failed.startswith(silent)


def test_no_second_service_is_started_where_one_stands_still(
    standing: ServedApart,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service_client, "TIMEOUT_S", 0.5)
    port = standing.url.rpartition(":")[2]
    words = ["service", "start", "--local-nodes", "1", "--folder", str(tmp_path / "G")]
    assert run_command([*words, "--port", port]) == FAILED
    assert f"who listens at {standing.url} does not answer" in capfd.readouterr().err
    assert not (tmp_path / "G").exists()


def test_the_page_says_that_the_service_stands_still_and_goes_on_with_it(
    served: ServedApart, browser: Any
) -> None:
    job = Client(served.url).submit(JOB)["id"]
    live = LivePage(browser, f"{served.url}/jobs/{job}")
    live.page.add_init_script(QUICK)
    live.page.reload()
    live.until("it is live", lambda: live.text("#link") == "live")
    served.stand_still()
    live.press("Stop")
    live.until("it says so", lambda: live.text("#link").startswith("Not connected"))
    live.until("of the button, too", lambda: "no answer came" in live.text("#said"))
    served.go_on()
    live.until("it is live again", lambda: live.text("#link") == "live")
    live.until("it was done", lambda: live.text(".badge") == "stopped")
    assert live.wrong == []
    live.close()
