"""What a crowd may ask of the service, and what a store that is away takes from those that wait."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.service import api, crews, hands, service, service_actor
from elastic_ft.service.access import Rights, new_token, read_token
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.floods import Room
from elastic_ft.service.office import Office
from elastic_ft.service.service import Service
from elastic_ft.service.service_client import Client, ServiceAway
from elastic_ft.storage.store import Store, open_store
from tests.oneproc.served import JOB, WAIT_S, Served, no_cluster, post
from tests.oneproc.test_service_hands import Bench, bench  # noqa: F401


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


def until(condition: Callable[[], object], what: str) -> None:
    until_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < until_s, what
        pause.wait(0.01)


def test_who_asks_for_what_lies_in_a_store_holds_up_nobody_and_has_an_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six readers of jobs that had ended, while the store was away, and no job could be looked at
    or changed; ten thousand of them waited in memory."""
    monkeypatch.setattr(crews.LOOKS, "asked_max", 6)
    client, back = served.client(), threading.Event()
    ended, live = client.submit(JOB)["id"], client.submit(JOB)["id"]
    client.stop(ended)
    until(lambda: served.service.knows(live), "it was looked at")
    until(lambda: ended not in served.service._busy, "it is done with")
    served.service._ended.clear()
    asked, read = threading.Semaphore(0), served.service.story

    def away(job: str) -> Any:
        if job == ended:
            asked.release()
            assert back.wait(WAIT_S)
        return read(job)

    monkeypatch.setattr(served.service, "story", away)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(client.status, ended) for _ in range(6)]
        try:
            for _ in range(4):  # as many as there are threads
                assert asked.acquire(timeout=WAIT_S)
            until(lambda: crews.LOOKS._asked.total() == 6, "the others wait")
            with pytest.raises(ServiceAway, match="6 are waiting for what lies in a store"):
                client.status(ended)
            assert client.status(live)["state"] == "queued"
            assert client.set_priority(live, 7)["priority"] == 7
        finally:
            back.set()
        assert {answer.result(WAIT_S)["state"] for answer in waiting} == {"stopped"}
    assert client.status(ended)["state"] == "stopped"


def test_streams_have_an_end_for_one_and_for_all() -> None:
    streams = Room("streams", 3, 2)
    with streams.for_one("ann"), streams.for_one("ann"):
        with pytest.raises(Exception, match="Too Many Requests"), streams.for_one("ann"):
            pass
        third = pytest.raises(Exception, match="Service Unavailable")
        with streams.for_one("bob"), third, streams.for_one("eve"):
            pass
        with streams.for_one("eve"):
            pass
    with streams.for_one(""), streams.for_one(""), streams.for_one(""):
        pass  # nobody has to say who it is


def test_who_follows_too_much_is_told_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand streams looked for news five times a second each."""
    monkeypatch.setattr(served.api, "_streams", Room("streams are followed", 1, 1))
    monkeypatch.setattr(api, "PING_EVERY_S", 0.01)
    job = served.client().submit(JOB)["id"]
    url = f"{served.url}/api/v1/jobs/{job}"
    with urllib.request.urlopen(f"{url}/events", timeout=WAIT_S) as stream:
        assert stream.readline().startswith(b": still")
        for kind in ("events", "steps", "logs"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/{kind}", timeout=WAIT_S)
            assert refused.value.code == 503
            assert "1 streams are followed already" in json.loads(refused.value.read())["error"]

    def is_free() -> bool:
        return not served.api._streams._taken.total()

    until(is_free, "who has gone is no reader")


def test_who_may_only_read_sends_no_megabytes(tmp_path: Path) -> None:
    """They were read, and waited for, before it was looked at who sends them."""
    digest = new_token(tmp_path / "bob")
    served = Served(tmp_path / "F", {"bob": Rights(digest, read=("*",))})
    try:
        head = (
            "POST /api/v1/jobs HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {read_token(tmp_path / 'bob')}\r\n"
            "Content-Length: 8000000\r\n\r\n"
        )
        where = urlsplit(served.url)
        with socket.create_connection((where.hostname or "", where.port or 0), WAIT_S) as there:
            there.sendall(head.encode())  # and nothing of the body
            said = there.recv(1 << 16)
        assert b"403" in said.splitlines()[0] and b"bob may read alone" in said
    finally:
        served.close()


def test_a_job_that_ended_long_ago_is_said_to_have(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core remembers a few thousand: of those before there was no job, to who had its page."""
    job = served.client().submit(JOB)["id"]
    served.client().stop(job)
    monkeypatch.setattr("elastic_ft.core.scheduling._unknown", lambda *_: f"there is no job {job}")
    client = served.client()
    for change in (lambda job: client.resize(job, 1), lambda job: client.set_priority(job, 1)):
        with pytest.raises(ConfigError, match=f"^{job}: it has stopped$"):
            change(job)


# --------------------------------------------------------------------- a store that is away


def test_what_was_not_taken_up_is_taken_back(tmp_path: Path) -> None:
    """Who was told that it could not be done now found it done later, and had done it again."""
    office = Office(Chronicle(open_store(str(tmp_path))), SharingTerms(), int, print)
    gone = office.ask(lambda standing: pytest.fail("it was taken back"))
    stays = office.ask(lambda standing: "told")
    assert gone.cancel()
    office.open()
    try:
        assert stays.result(WAIT_S) == "told"
        with pytest.raises(CancelledError):
            gone.result(WAIT_S)
    finally:
        office.close()


def test_a_submission_that_may_have_been_taken_in_is_asked_about(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "ANSWER_TIMEOUT_S", 0.2)
    away, append = threading.Event(), Chronicle.append

    def held(*args: Any) -> None:
        assert away.wait(WAIT_S)
        append(*args)

    monkeypatch.setattr(Chronicle, "append", held)
    asked = json.dumps({"job": JOB, "request": "r1"}).encode()
    client = Client(served.url, away_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(served, asked)
            found = json.loads(refused.value.read())
            assert found["in_doubt"] is True and "it may be done later, or not" in found["error"]
            # It was not taken up: another is being written.
            with pytest.raises(urllib.error.HTTPError) as late:
                post(served, json.dumps({"job": JOB, "request": "r2"}).encode())
            assert "in_doubt" not in (said := json.loads(late.value.read()))
            assert said["error"].endswith("can't be written now: nothing was done")
            again = pool.submit(client.submit, JOB)
            with pytest.raises(ServiceAway, match="nothing was done"):
                again.result(WAIT_S)
        finally:
            away.set()
    with post(served, asked) as answer:
        assert json.loads(answer.read())["id"] == "tiny-1"
    assert [job["id"] for job in served.client().jobs()] == ["tiny-1"]


def test_a_start_that_failed_over_its_store_is_repeated_and_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was killed while its store was away was never there again: Ray does not make
    an actor once more that can't be made."""
    monkeypatch.setattr(service_actor, "AGAIN_S", 0.0)
    left = [3]

    def away(self: Store, *_: Any) -> list[str]:
        left[0] -= 1
        if left[0] > 0:
            raise StoreFailed("busy")
        return listed(self, *_)

    listed = Store.list
    monkeypatch.setattr(Store, "list", away)
    made = Service(str(tmp_path), SharingTerms(), no_cluster, print, Sight)
    with pytest.raises(StoreFailed, match="busy"):
        service_actor.insisted(made.start, False)
    service_actor.insisted(made.start, True)
    try:
        assert made.submit({"job": JOB}, "").result(WAIT_S) == "tiny-1"
    finally:
        made.close()


@pytest.mark.parametrize("first", ["running", "queued"])
def test_thousands_that_wait_are_looked_at_behind_who_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A service that began looked at each of them once, and at nobody else until it was done; nor
    is a job that gets room behind those that still wait."""
    nodes, held = {"n0": 1} if first == "running" else {}, threading.Event()
    made = Service(
        str(tmp_path), SharingTerms(), no_cluster, print, lambda: Sight(time.monotonic(), nodes)
    )
    stepped = list[str]()

    def slow(job: str) -> None:
        if not hands.is_at_work(made.office.standing.sharing.jobs[job]):
            assert held.wait(WAIT_S)
        stepped.append(job)

    monkeypatch.setattr(made, "_step", slow)
    made.start()
    try:
        for _ in range(12):
            made.submit({"job": JOB}, "").result(WAIT_S)
        until(lambda: len(made._busy) == 12, "all are to be looked at")
        if first == "queued":  # the last of those that wait to be looked at
            made.set_priority("tiny-12", 5, "").result(WAIT_S)
            nodes["n0"] = 1
        until(lambda: stepped, "who is at work is seen to")
        assert set(stepped) == {"tiny-1" if first == "running" else "tiny-12"}
    finally:
        held.set()
        made.close()


def test_jobs_at_work_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stood in line was sent to its end with each round: the first few were looked at for ever,
    where a look takes longer than a round."""
    monkeypatch.setattr(service, "HANDS", 1)
    monkeypatch.setattr(service, "is_at_work", lambda shared: True)
    made = Service(str(tmp_path), SharingTerms(), no_cluster, print, Sight)
    stepped = list[str]()

    def slow(job: str) -> None:
        stepped.append(job)
        threading.Event().wait(1.5 * service.ROUND_S)

    monkeypatch.setattr(made, "_step", slow)
    made.start()
    try:
        for _ in range(5):
            made.submit({"job": JOB}, "").result(WAIT_S)
        until(lambda: len(made._busy) == 5, "all are to be looked at")
        begun = len(stepped)
        until(lambda: len(set(stepped[begun + 1 :])) == 5, "each of them is looked at")
    finally:
        made.close()


def test_a_controller_whose_folder_could_not_be_read_has_its_time(
    bench: Bench,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was ended for having done nothing, by who could not see what it did."""
    monkeypatch.setattr(hands, "actor_named", lambda name: object())
    hand = bench.hand()
    hand.step(Sight())
    led, began_s = frozenset([hand.names.prefix]), time.monotonic()
    hand._submitted_s -= 1000.0
    (bench.run / "result.json").mkdir()
    hand.step(Sight(began_s, led=led))
    assert "can't be read" in hand.story.trouble and bench.phase == "starting"
    (bench.run / "result.json").rmdir()
    hand.step(Sight(began_s + 10.0, led=led))
    assert bench.phase == "starting"
    hand.step(Sight(began_s + 100.0, led=led))
    assert bench.phase == "queued"
