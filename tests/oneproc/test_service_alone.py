"""The service without a cluster: a journal, an interface, and jobs that wait for nodes."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms
from elastic_ft.errors import ConfigError, StorageError, StoreFailed, UsageError
from elastic_ft.service import api, service, service_actor
from elastic_ft.service.api import Api
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.office import Refused
from elastic_ft.service.served_at import HowToServe
from elastic_ft.service.service import Service
from elastic_ft.service.service_client import ServiceAway
from elastic_ft.storage.store import open_store
from tests.oneproc.served import JOB, TERMS, WAIT_S, Served, no_cluster, post, told


def test_none_of_many_is_lost_or_there_twice(serve: Callable[..., Served]) -> None:
    """What was answered is journalled: one that is superseded in the middle leaves it whole."""
    first = serve()
    client = first.client()
    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(lambda n: client.submit(JOB, priority=n % 3)["id"], range(200)))
    assert len(set(ids)) == 200
    again = serve()
    assert first.superseded.wait(WAIT_S)
    found = again.client().jobs()
    assert sorted(job["id"] for job in found) == sorted(ids)
    assert {job["state"] for job in found} == {"queued"}
    assert "the nodes that there are hold 0" in found[0]["why"]
    assert again.service.office.standing == first.service.office.standing
    assert again.client().submit(JOB)["id"] == "tiny-201"


def test_the_later_of_two_reads_what_the_earlier_still_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one took in a job before it looked at its claim: both ended."""
    monkeypatch.setattr(service, "FENCE_EVERY_S", 2 * WAIT_S)  # it is the journal that says it
    first = Served(tmp_path / "F")
    second = Served(tmp_path / "F")
    try:
        assert first.client().submit(JOB)["id"] == "tiny-1"
        assert second.client().submit(JOB)["id"] == "tiny-2"
        assert not second.superseded.is_set()
        assert [job["id"] for job in second.client().jobs()] == ["tiny-1", "tiny-2"]
        first.service.stop("tiny-1", False, "")
        assert first.superseded.wait(WAIT_S)
        assert second.client().status("tiny-1")["state"] == "queued"
        third = Chronicle(open_store(str(tmp_path / "F"))).read()
        assert [line["event"] for line in third] == ["TermsChanged", "JobSubmitted", "JobSubmitted"]
    finally:
        first.close()
        second.close()


def test_a_journal_is_what_the_service_has_written_and_all_of_it(tmp_path: Path) -> None:
    """A copy beside an object was read in its place, anything else was no number; of one that was
    deleted nobody was told, and jobs were lost."""
    chronicle = Chronicle(open_store(str(tmp_path)))
    for number in range(1, 5):
        chronicle.append([{"n": number}])
    folder = tmp_path / "journal"
    (folder / "00000002.jsonl.bak").write_text('{"n": 7}\n')
    (folder / "2.jsonl").write_text('{"n": 8}\n')
    (folder / "notes").write_text("mine")
    assert [line["n"] for line in Chronicle(open_store(str(tmp_path))).read()] == [1, 2, 3, 4]
    (folder / "00000003.jsonl").unlink()
    (folder / "20261124093000.jsonl").write_text("")  # a copy by its date
    with pytest.raises(StorageError, match=r"journal: journal/00000003.jsonl is not there"):
        Chronicle(open_store(str(tmp_path))).read()


def test_the_same_request_is_one_job(serve: Callable[..., Served]) -> None:
    """The client has lost the answer, and asks again."""
    served = serve()
    asked = json.dumps({"job": JOB, "request": "r1"}).encode()
    ids = set()
    for _ in range(2):
        with post(served, asked) as answer:
            ids.add(json.loads(answer.read())["id"])
    assert ids == {"tiny-1"}


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"job": {**JOB, "stepz": 1}}, "stepz: unknown key, did you mean steps?"),
        ({"job": "name: [unclosed"}, "job: not YAML"),
        ({"job": 7}, "job: expected a mapping of sections, found int"),
        ({"job": JOB, "queue": "fast"}, "there is no queue fast, but: default, research"),
        ({"job": JOB, "priority": "high"}, "priority: expected a whole number"),
        (
            {"job": JOB, "name": "a b"},
            "name: expected letters, digits, '.', '_' and '-', of which a",
        ),
        ({"job": JOB, "name": "tiny\n"}, "name: expected letters"),
        (
            {"job": JOB, "name": "-x"},
            "name: expected letters, digits, '.', '_' and '-', of which a",
        ),
        ({"job": JOB, "name": "n" * 101}, "name: expected at most 100 characters"),
        ({"job": JOB, "name": 7}, "name: "),
        ({"job": None}, "job: expected a mapping of sections, found nothing"),
        ({"job": {**JOB, "name": "n" * 260}}, "name: "),
        (
            {"job": {**JOB, "elastic": {"min_workers": 4, "max_workers": 8}}, "queue": "research"},
            "it needs 4 slots at least, queue research may use 2",
        ),
    ],
)
def test_a_bad_job_is_one_line(
    serve: Callable[..., Served], asked: dict[str, Any], line: str
) -> None:
    served = serve()
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served, json.dumps(asked).encode())
    assert refused.value.code == 422
    said = json.loads(refused.value.read())["error"]
    assert said.startswith(line) and "\n" not in said
    assert served.client().jobs(all=True) == []


def test_a_job_that_waits_is_changed_and_stopped(serve: Callable[..., Served]) -> None:
    client = serve().client()
    job = client.submit({**JOB, "elastic": {"min_workers": 2, "max_workers": 4}})["id"]
    assert client.set_priority(job, 7)["priority"] == 7
    with pytest.raises(ConfigError, match="1 is not within 2 and 4"):
        client.resize(job, 1)
    assert client.resize(job, 3)["workers"]["target"] == 0
    assert client.stop(job)["state"] == "stopped"
    assert client.stop(job)["state"] == "stopped"  # who has lost the answer asks again
    with pytest.raises(ConfigError, match="it has stopped"):
        client.set_priority(job, 1)
    with pytest.raises(ConfigError, match="there is no job nosuch"):
        client.status("nosuch")
    assert list(client.events(job, follow=True)) == []  # it never ran: the stream ends at once
    assert [job["state"] for job in client.jobs(all=True)] == ["stopped"]


def test_a_service_that_stops_its_jobs_takes_none_in(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended by itself meanwhile is no reason not to; one that does not end is."""
    served = serve()
    client = served.client()
    monkeypatch.setattr(api, "STOP_TIMEOUT_S", 4.0)
    gone, stays = Future[str](), Future[str]()
    gone.set_exception(api.NotKnown("tiny-1: it has completed"))
    monkeypatch.setattr(served.service, "stop_all", lambda by: [gone, stays])
    client.submit(JOB)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(client.stop_service, "stop")
        until_s = time.monotonic() + WAIT_S
        with pytest.raises(ServiceAway, match="the service is being stopped"):
            while time.monotonic() < until_s:
                client.submit(JOB)
        stays.set_result("")
        with pytest.raises(ConfigError, match="after 4 s there are jobs: tiny-1"):
            stopping.result(WAIT_S)
    client.submit(JOB)  # it goes on


def test_an_actor_that_can_not_serve_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread had failed before it was listened to: it waited for ever."""

    class Inline(threading.Thread):
        def start(self) -> None:
            if self.name == "http":
                super().start()
                self.join(WAIT_S)

    context = SimpleNamespace(current_actor=None, was_current_actor_reconstructed=False)
    monkeypatch.setattr(service_actor.ray, "get_runtime_context", lambda: context)
    threads = SimpleNamespace(Thread=Inline, Event=threading.Event)
    monkeypatch.setattr(service_actor, "threading", threads)
    monkeypatch.setattr(service_actor, "set_title", print)
    monkeypatch.setattr(service_actor, "Service", lambda *_, **__: SimpleNamespace(start=print))
    with pytest.raises(UsageError, match="--tls-cert, --tls-key"):
        none = str(tmp_path / "none")
        service_actor.ServiceActor(HowToServe(str(tmp_path), tls_cert=none, tls_key=none))


def test_an_actor_that_can_not_read_its_port_takes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_actor, "set_title", print)
    made = object.__new__(service_actor.ServiceActor)
    made._service = Service(str(tmp_path), TERMS, no_cluster, print, look=Sight)
    monkeypatch.setattr(made, "_is_restarted", lambda: False)
    assert made._earlier_port() == 0
    (tmp_path / service_actor.PORT_FILE).mkdir()
    with pytest.raises(StoreFailed, match=r"service\.json"):
        made._earlier_port()


def test_a_queue_with_jobs_stays(serve: Callable[..., Served], tmp_path: Path) -> None:
    """Without it nothing was decided any more."""
    served = serve()
    job = served.client().submit(JOB, queue="research")["id"]
    served.service.close()
    journal = sorted((tmp_path / "F/journal").iterdir())
    with pytest.raises(ConfigError, match=f"queues: research is not .* has jobs: {job}"):
        Served(tmp_path / "F", terms=SharingTerms({"default": QueueTerms()}))
    assert sorted((tmp_path / "F/journal").iterdir()) == journal
    assert serve().client().stop(job)["state"] == "stopped"


def test_all_readers_of_a_job_that_ended_have_its_story(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second had an empty one while the first's was read; the kept ones had no end."""
    monkeypatch.setattr(service, "STORIES_KEPT", 1)
    served = serve()
    client = served.client()
    jobs = [client.submit(JOB)["id"] for _ in range(3)]
    for job in jobs:
        client.stop(job)
    again = serve()  # it has no hand of any
    told(tmp_path / "F/jobs" / jobs[0], 5)
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: len(again.service.story(jobs[0]).steps.since(0)[0]), range(8))
        )
    assert found == [5] * 8
    for job in jobs:
        again.service.story(job)
    assert list(again.service._ended) == jobs[-1:]

    monkeypatch.setattr(service, "STORIES_KEPT", 9)
    monkeypatch.setattr(service, "LINES_KEPT", 4)  # they were megabytes each, however many
    for job in jobs:
        again.service._ended.clear()
        for each in (job, *jobs):
            again.service.story(each)
        assert list(again.service._ended) == jobs[1:]


def test_a_job_that_waits_is_read_once_by_the_next_service(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    """One that was suspended was shown at step 0."""
    job = serve().client().submit(JOB)["id"]
    told(tmp_path / "F/jobs" / job, 7)
    client, until_s = serve().client(), time.monotonic() + WAIT_S
    while (step := client.jobs()[0]["step"]) != 7:
        assert time.monotonic() < until_s, step


def test_jobs_that_wait_are_looked_at_once(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them kept the service busy, five times a second."""
    served, until_s = serve(), time.monotonic() + WAIT_S
    made = served.service
    jobs = {served.client().submit(JOB)["id"] for _ in range(3)}
    while made._hands.keys() != jobs or not all(busy.done() for busy in made._busy.values()):
        assert time.monotonic() < until_s
        served.superseded.wait(0.05)
    stepped: list[str] = []
    monkeypatch.setattr(made, "_step", stepped.append)
    made._round()
    made._pool.submit(int).result(WAIT_S)
    assert stepped == []


def test_a_store_that_is_away_holds_up_nobody_else(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads waited for it, and no job was taken in."""
    served, back, asked = serve(), threading.Event(), threading.Semaphore(0)
    client = served.client()
    job = client.submit(JOB)["id"]

    def away(job: str) -> Any:
        asked.release()
        assert back.wait(WAIT_S)
        raise Refused("it was away")

    monkeypatch.setattr(served.service, "story", away)
    monkeypatch.setattr(served.service, "knows", lambda job: False)  # as of one that has ended
    with ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(client.status, job) for _ in range(40)]
        try:
            assert asked.acquire(timeout=WAIT_S)
            assert client.submit(JOB)["id"] == "tiny-2"
            assert [each["id"] for each in client.jobs()] == ["tiny-1", "tiny-2"]
            assert client.service()["folder"]
            assert not any(answer.done() for answer in waiting)
        finally:
            back.set()


def test_who_says_nothing_is_let_go(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's connections were kept for an hour, as many as there are descriptors."""
    monkeypatch.setattr(service_actor, "SILENT_S", 1.0)
    served = serve()
    host, port = served.url.removeprefix("http://").split(":")
    for said in (b"", b"GET /api/v1/jobs HTTP/1.1\r\nHost:"):
        with socket.create_connection((host, int(port)), WAIT_S) as stranger:
            stranger.sendall(said)
            assert stranger.recv(1) == b""


def test_a_client_that_never_reads_is_let_go(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held a connection and what was written to it, for as long as it liked."""
    monkeypatch.setattr(api, "TAKEN_WITHIN_S", 1.0)
    monkeypatch.setattr(api, "ITEMS_AT_ONCE", 7)
    job = serve().client().submit(JOB)["id"]
    told(tmp_path / "F/jobs" / job, 60_000)  # more than sockets hold
    served = serve()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(f"GET /api/v1/jobs/{job}/steps HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        for wanted in (1, 0):
            until_s = time.monotonic() + WAIT_S
            while served.connections() != wanted:
                assert time.monotonic() < until_s, "it is kept"
                served.superseded.wait(0.05)
    with urllib.request.urlopen(f"{served.url}/api/v1/jobs/{job}/steps?follow=0") as answer:
        assert len(json.loads(answer.read())["steps"]) >= 25_000


def test_the_interface_is_documented(serve: Callable[..., Served]) -> None:
    served = serve()
    with urllib.request.urlopen(f"{served.url}/api/v1/openapi.json", timeout=WAIT_S) as answer:
        said = json.loads(answer.read())
    app = Api(served.service, {}, print).application()
    routes = {
        (route.resource.canonical.removeprefix("/api/v1"), route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.resource.canonical.startswith("/api/v1")
    }
    served_paths = {(path, verb) for path, verb in routes if verb != "head"}
    assert {(p, verb) for p, verbs in said["paths"].items() for verb in verbs} == served_paths
    client = served.client()
    job = client.submit(JOB)["id"]
    schemas = said["components"]["schemas"]
    assert client.jobs()[0].keys() == schemas["Job"]["properties"].keys()
    assert client.status(job).keys() == schemas["WholeJob"]["properties"].keys()


def test_prometheus_is_told_of_queues(serve: Callable[..., Served]) -> None:
    served = serve()
    client = served.client()
    for queue in ("default", "default", "research"):
        client.submit(JOB, queue=queue)
    client.stop("tiny-1")
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    assert 'elastic_ft_service_jobs{queue="default",state="queued"} 1.0' in lines
    assert 'elastic_ft_service_jobs{queue="default",state="stopped"} 1.0' in lines
    assert 'elastic_ft_service_jobs{queue="research",state="queued"} 1.0' in lines
    assert 'elastic_ft_service_decisions_total{kind="start"} 0.0' in lines
