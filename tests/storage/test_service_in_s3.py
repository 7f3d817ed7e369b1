"""The service's folder is in S3, and the store is away for a while: what is told is journalled, or
refused with a line; what runs is shared out as before once it is back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import S3Server
from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.service import api, hands, service
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service_client import Client, ServiceAway
from elastic_ft.storage.objects import Objects
from elastic_ft.storage.store import Store, open_store
from tests.oneproc.served import JOB, WAIT_S, Served

BUSY = StoreFault("busy")


class SmallCluster:
    """One node of one slot, and controllers that do as they are told here. Run folders are written
    past the proxy: theirs is another way to the store.

    Attributes:
        begun: run URLs, in order.
    """

    def __init__(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._s3, self._led = list[str](), s3, set[str]()
        monkeypatch.setattr(hands, "actor_named", lambda name: name if name in self._led else None)
        monkeypatch.setattr(hands, "end_actor", self._led.discard)
        monkeypatch.setattr(hands, "clear_away", lambda *_: None)
        monkeypatch.setattr(hands, "groups_of", lambda prefix: {})

    def put(self, url: str, name: str, content: str) -> None:
        path = url.partition("://")[2]
        store = Store(url, Objects("s3", path, endpoint=self._s3.endpoint))
        store.put(name, content.encode())

    def begin(self, job: Any, url: str) -> None:
        self.begun.append(url)
        self._led.add(hands.RunNames(job.name, url).controller)
        line = {"event": "generation_formed", "seq": 0, "at_s": time.time(), "step": 0}
        self.put(url, "events.jsonl", json.dumps(line) + "\n")

    def look(self) -> Sight:
        led = frozenset(name.removesuffix("controller") for name in self._led)
        return Sight(time.monotonic(), {"n0": 1}, {"n0": "here"}, {}, led)


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreProxy]:
    with ObjectStoreProxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def cluster(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> SmallCluster:
    cluster = SmallCluster(s3, monkeypatch)
    made = service.Service

    def on_it(folder: str, terms: SharingTerms, *_: Any, **__: Any) -> service.Service:
        return made(folder, terms, cluster.begin, print, cluster.look)

    monkeypatch.setattr("tests.oneproc.served.Service", on_it)
    return cluster


def until(condition: Callable[[], object], what: str) -> None:
    until_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < until_s, what
        pause.wait(0.02)


def states(client: Client) -> list[str]:
    return [job["state"] for job in client.jobs(all=True)]


def test_a_store_that_is_away_loses_nothing_and_doubles_nothing(
    s3: S3Server,
    proxy: ObjectStoreProxy,
    cluster: SmallCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "ANSWER_TIMEOUT_S", 0.5)
    url = s3.url(f"services/{uuid4().hex}")
    served = Served(url)
    patient, hasty = Client(served.url, away_s=1.0), served.client()
    try:
        for _ in range(2):
            patient.submit(JOB)
        until(lambda: states(hasty) == ["running", "queued"], "one has room")

        proxy.set(BUSY)
        with ThreadPoolExecutor(1) as pool:
            # Of this one nobody knows whether the store has it: it is asked about until it does.
            asked = pool.submit(patient.submit, JOB)
            until(lambda: hasty.service()["trouble"], "it is noticed")
            # Of these it is known that nothing was done.
            for change in (
                lambda: hasty.submit(JOB),
                lambda: patient.submit(JOB),
                lambda: hasty.set_priority("tiny-2", 7),
            ):
                with pytest.raises(ServiceAway, match="can't be written now: nothing was done"):
                    change()
            cluster.put(cluster.begun[0], "result.json", '{"status": "completed"}')
            assert states(hasty) == ["running", "queued"]  # it is told what is known
            with pytest.raises(TimeoutError):
                asked.result(1.5)  # longer than it waits for a service that is away
            proxy.set()
            assert asked.result(WAIT_S)["id"] == "tiny-3"
        until(lambda: states(hasty)[:2] == ["completed", "running"], "the next one has room")
        assert states(hasty) == ["completed", "running", "queued"]
        assert cluster.begun == [f"{url}/jobs/tiny-1", f"{url}/jobs/tiny-2"]
        assert hasty.status("tiny-2")["priority"] == 0
    finally:
        proxy.set()
        served.close()
    again = Served(url)
    try:
        assert states(again.client()) == ["completed", "running", "queued"]
    finally:
        again.close()


def test_of_two_services_with_one_folder_the_later_goes_on_and_nothing_is_done_twice(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two machines: no lock of one of them keeps the second from starting."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    url = s3.url(f"services/{uuid4().hex}")
    first = Served(url)
    try:
        assert first.client().submit(JOB)["id"] == "tiny-1"
        second = Served(url)
        try:
            answered = ["tiny-1"]
            with contextlib.suppress(ServiceAway):  # it may not know yet: what it answers counts
                answered.append(first.client().submit(JOB)["id"])
            assert first.superseded.wait(WAIT_S)
            answered.append(second.client().submit(JOB)["id"])
            assert not second.superseded.is_set()
            assert [job["id"] for job in second.client().jobs(all=True)] == answered
            assert len(set(answered)) == len(answered)
        finally:
            second.close()
    finally:
        first.close()


def test_a_long_journal_is_read_from_where_it_goes_on(s3: S3Server) -> None:
    """Each reading listed all that the journal ever was, a thousand names at a time."""
    store = open_store(s3.url(f"services/{uuid4().hex}"))
    before, written = Chronicle(store), 1200  # more than a list of S3 has at once
    nonce = json.dumps({"nonce": "n"})
    with ThreadPoolExecutor(16) as pool:
        for number in range(1, written + 1):
            line = json.dumps({"n": number})
            pool.submit(store.put, f"journal/{number:08d}.jsonl", f"{nonce}\n{line}\n".encode())
    assert [line["n"] for line in before.read()] == list(range(1, written + 1))
    again = Chronicle(store)
    again.go_on_after(written - 5, "n")
    listed, listing = list[str](), store.backend.list

    def watched(*args: Any) -> list[str]:
        found = listing(*args)
        listed.extend(found)
        return found

    store.backend.list = watched  # type: ignore[method-assign]
    assert [line["n"] for line in again.read()] == list(range(written - 4, written + 1))
    before.append([{"n": written + 1}])
    assert [line["n"] for line in again.read()] == [written + 1]
    assert len(listed) == 6
