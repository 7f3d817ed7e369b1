"""How a service begins and ends, and what it does while its journal can't be written."""

from __future__ import annotations

import gc
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.errors import ConfigError, StoreFailed, Superseded
from elastic_ft.service import api, hands, starting
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.office import Office
from elastic_ft.service.service import Service
from elastic_ft.service.service_client import Client, ServiceAway
from elastic_ft.service.service_config import load_config
from tests.oneproc.served import JOB, WAIT_S, Served, no_cluster, post
from tests.oneproc.test_service_hands import Bench, bench, later  # noqa: F401
from tests.waiting import until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


def test_a_service_that_waits_for_the_head_answers_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one thread for requests took back what the autoscaler was asked for: for 10 s nobody was
    answered. And no job is taken in that nobody would start."""
    ends, goes = threading.Event(), threading.Event()

    def leave() -> None:
        ends.set()
        assert goes.wait(WAIT_S)

    monkeypatch.setattr(served.api, "_on_stop", leave)
    client, about = served.client(), served.client().service()
    client.stop_service()
    try:
        assert ends.wait(WAIT_S)
        with ThreadPoolExecutor(1) as pool:
            try:
                assert pool.submit(client.jobs).result(WAIT_S / 3) == []
            finally:
                goes.set()
        with pytest.raises(ServiceAway, match="the service is being stopped"):
            client.submit(JOB)
        assert not starting.is_gone(client, about, 0.3)
    finally:
        goes.set()
    assert starting.is_gone(Client("http://127.0.0.1:9", away_s=0.0), about, WAIT_S)
    assert starting.is_gone(client, about | {"starts": 7}, WAIT_S)  # it is another one


def test_a_job_that_is_being_taken_in_is_stopped_with_the_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after those that were asked to stop: the service waited for it for 9 minutes, and
    then did not end."""
    monkeypatch.setattr(api, "STOP_TIMEOUT_S", 20.0)
    taken_in, asked = served.service.submit, served.service.stop_all
    goes_on, reading = threading.Event(), threading.Event()

    def late(job: dict[str, Any], by: str) -> Future[str]:
        reading.set()
        assert goes_on.wait(WAIT_S)
        return taken_in(job, by)

    def stop_all(by: str) -> list[Future[str]]:
        found = asked(by)
        if not goes_on.is_set():
            goes_on.set()
            until(lambda: served.service.office.standing.orders, "it is taken in")
        return found

    monkeypatch.setattr(served.service, "submit", late)
    monkeypatch.setattr(served.service, "stop_all", stop_all)
    with ThreadPoolExecutor(2) as pool:
        job = pool.submit(served.client().submit, JOB)
        assert reading.wait(WAIT_S)
        pool.submit(served.client().stop_service, "stop").result(WAIT_S)
        assert served.client().status(job.result(WAIT_S)["id"])["state"] == "stopped"


def test_who_leaves_a_stream_leaves_nothing_in_the_log(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time a page was closed there was a traceback."""
    monkeypatch.setattr(api, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(api, "STREAM_EVERY_S", 0.01)
    job = served.client().submit(JOB)["id"]
    with urllib.request.urlopen(f"{served.url}/api/v1/jobs/{job}/events", timeout=WAIT_S) as stream:
        assert stream.readline().startswith(b": still")
    until(lambda: not served.api._streams._taken.total(), "whoever had it is gone")
    assert served.client().status(job)["state"] == "queued"
    assert "Error handling request" not in caplog.text


def test_what_was_in_doubt_when_the_service_ended_leaves_nothing_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback of a future whose exception nobody had asked for; with a full disk, say."""
    monkeypatch.setattr(api, "ANSWER_TIMEOUT_S", 0.1)
    served = Served(tmp_path / "F")
    ends = threading.Event()

    def held(chronicle: Chronicle, lines: object) -> None:
        ends.wait(WAIT_S)
        raise Superseded("the service ends")

    monkeypatch.setattr(Chronicle, "append", held)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(served, json.dumps({"job": JOB}).encode())
        assert json.loads(refused.value.read())["in_doubt"]
    finally:
        ends.set()
        served.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    ("path", "asked", "line"),
    [
        ("jobs", {"job": JOB, "priorty": 9}, "priorty: unknown key, expected job, priority, queue"),
        ("jobs/tiny-1/stop", {"nwo": True}, "nwo: unknown key, expected now"),
        ("jobs/tiny-1/resize", {"workers": 1, "wait": True}, "wait: unknown key, expected workers"),
        ("service/stop", {"job": "stop"}, "job: unknown key, expected jobs"),
    ],
)
def test_what_is_misspelt_is_not_left_out(
    served: Served, path: str, asked: dict[str, Any], line: str
) -> None:
    """The urgent job had no priority, and nobody said so; jobs went on that were to be stopped."""
    served.client().submit(JOB)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, json.dumps(asked).encode(), path)
    assert refused.value.code == 422
    assert json.loads(refused.value.read())["error"].startswith(line)
    assert [job["state"] for job in served.client().jobs(all=True)] == ["queued"]


def test_the_first_job_knows_what_a_node_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was submitted before anybody had looked at the nodes: one slot of eight was a whole
    node."""

    monkeypatch.setattr("elastic_ft.service.service.SEEN_WITHIN_S", WAIT_S)
    slow = threading.Event()

    def look() -> Sight:
        slow.wait(0.5)
        return Sight(time.monotonic(), {"n0": 8}, kind="GPU")

    service = Service(str(tmp_path), SharingTerms(), lambda *_: None, print, look)
    service.start()
    try:
        job = service.submit({"job": JOB}, "").result(WAIT_S)
        assert service.office.standing.wishes[job].slots_per_worker == 8
    finally:
        service.close()


def test_nodes_that_nobody_sees_keep_no_service_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ft.service.service.SEEN_WITHIN_S", 0.2)

    def look() -> Sight:
        raise ConnectionError("the head is away")

    service = Service(str(tmp_path), SharingTerms(), no_cluster, print, look)
    service.start()
    try:
        assert service.submit({"job": JOB}, "").result(WAIT_S) == "tiny-1"
    finally:
        service.close()


def test_a_journal_that_is_away_is_told_of_time_and_nodes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five ticks a second: an hour later they were all decided on, one after the other."""
    back, told = threading.Event(), Counter[str]()
    seen = iter(range(1, 10**6))

    def look() -> Sight:
        return Sight(time.monotonic(), {f"n{next(seen)}": 1})

    class Watched(Office):
        def tell(self, event: asks.SharingEvent, note: str = "", step: int = 0) -> Future[str]:
            told[type(event).__name__] += 1
            return super().tell(event, note, step)

    monkeypatch.setattr("elastic_ft.service.service.Office", Watched)
    monkeypatch.setattr("elastic_ft.service.service.ROUND_S", 0.01)
    monkeypatch.setattr("elastic_ft.service.cluster_watch.EVERY_S", 0.01)
    service = Service(str(tmp_path), SharingTerms(), lambda *_: None, print, look)
    written = Chronicle.append

    def away(self: Chronicle, entries: list[Any]) -> None:
        assert back.wait(WAIT_S)
        written(self, entries)

    service.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Chronicle, "append", away)
            patch.setattr(Office, "_is_due", lambda _: True)
            stuck = service.submit({"job": JOB}, "")
            before, looks = told.copy(), next(seen)
            until(lambda: next(seen) > looks + 100, "the nodes are looked at")
            assert not stuck.done()
            more = told - before
            assert more["Ticked"] <= 2 and more["CapacityChanged"] <= 2, more
            back.set()
        assert stuck.result(WAIT_S) == "tiny-1"
    finally:
        back.set()
        service.close()


def test_what_is_on_its_way_to_the_journal_is_not_told_again(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store was away for more than ten minutes: that a worker had gone was told twice, and
    another's place was promised to somebody else."""
    hand = bench.hand()
    hand.step(Sight())
    (bench.run / "result.json").write_text(json.dumps({"status": "completed"}))
    told, on_its_way = list[asks.SharingEvent](), Future[str]()

    def tell(event: asks.SharingEvent, note: str = "", step: int = 0) -> Future[str]:
        told.append(event)
        return on_its_way

    with monkeypatch.context() as patch:
        patch.setattr(hands, "TELL_TIMEOUT_S", 0.05)
        patch.setattr(bench.office, "tell", tell)
        for _ in range(4):
            hand.step(later())
        assert [type(event).__name__ for event in told] == ["JobEnded"]
        assert hand.trouble == "the service's journal can't be written now"
        on_its_way.set_exception(StoreFailed("it is away for good"))
        hand.step(later())
        assert hand.trouble == "it is away for good"
        hand.step(later())
        assert len(told) == 2
    hand.step(later())
    assert bench.phase == "completed"


def test_the_config_of_a_service_has_no_weight_that_is_none(tmp_path: Path) -> None:
    """Shares were divided by it: infinity is no number of workers, and nothing was decided."""
    path = tmp_path / "config.yaml"
    path.write_text("queues: {default: {weight: 1.0e-310}}\n")
    with pytest.raises(ConfigError, match=r"queues\.default\.weight"):
        load_config(path)
