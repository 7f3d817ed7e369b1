"""Reads that another thread breaks off, and deadlines that follow the bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.object_store_proxy import ObjectStoreProxy, StoreFault
from chaos.s3_server import S3Server
from elastic_ft.storage import cancellable
from elastic_ft.storage.cancellable import CancellableStore
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store
from tests.waiting import until

AT_ONCE_S = 20.0  # below every deadline here
PATIENT_S = 60.0


@pytest.fixture
def proxied(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreProxy]:
    with ObjectStoreProxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def test_it_reads_as_any_store_does(url: str) -> None:
    received: list[int] = []
    plain, store = open_store(url), CancellableStore(url, moved=received.append)
    if url.startswith("memory:"):  # each has one of its own
        plain = store
    body = os.urandom(3 << 20)
    plain.put("a/b", body)
    assert bytes(store.read("a/b", 5, len(body) - 5)) == body[5:-5]
    assert sum(received) == len(body) - 10
    assert bytes(store.read("a/b", len(body) - 5, len(body) + 5)) == body[-5:]
    assert bytes(store.read("a/b", len(body) + 5, len(body) + 9)) == b""
    assert store.get("a/b") == body and store.size("a/b") == len(body)
    assert store.list() == ["a/b"]
    with pytest.raises(StoreError) as caught:
        store.read("c", 0, 1)
    assert caught.value.kind is FailureKind.MISSING


def ends_when_closed(store: CancellableStore, is_at_it: Callable[[], bool] = lambda: True) -> None:
    """The store hangs: a read ends once it is closed, and none begins after."""
    ended: list[Any] = []

    def read() -> None:
        try:
            ended.append(store.read("shard", 0, 8))
        except StoreError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    deadline_s, pause = time.monotonic() + PATIENT_S, threading.Event()
    while not is_at_it():
        assert time.monotonic() < deadline_s
        pause.wait(0.01)
    store.close()
    reader.join(AT_ONCE_S)
    assert not reader.is_alive(), "it still waits for the store"
    assert "Closed" in str(ended[0])
    with pytest.raises(StoreError, match="Closed"):
        store.size("shard")


def test_a_folder_that_hangs_is_left(tmp_path: Path) -> None:
    """A pipe without a writer: as a mounted folder whose server is gone."""
    os.mkfifo(tmp_path / "shard")
    ends_when_closed(CancellableStore(str(tmp_path), PATIENT_S))
    os.close(os.open(tmp_path / "shard", os.O_RDWR))  # wakes the thread that was left


def test_a_folder_that_hangs_is_unreachable_in_the_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard")
    with pytest.raises(StoreError) as caught:
        CancellableStore(str(tmp_path), deadline_s=0.1).read("shard", 0, 8)
    assert caught.value.kind is FailureKind.UNREACHABLE
    os.close(os.open(tmp_path / "shard", os.O_RDWR))


def test_threads_that_a_folder_keeps_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call to a mount that hung left one more: one or two a minute, for as long as a job
    looked who has the checkpoints."""
    monkeypatch.setattr(cancellable, "GRACE_S", 0.0)
    monkeypatch.setattr(cancellable, "LEFT_MAX", 3, raising=False)
    os.mkfifo(tmp_path / "shard")

    def left() -> int:
        return sum(thread.name == "store-call" for thread in threading.enumerate())

    before, said = left(), list[str]()
    for _ in range(6):  # a generation's own store, each
        with pytest.raises(StoreError) as caught:
            CancellableStore(str(tmp_path), deadline_s=0.1).read("shard", 0, 8)
        assert caught.value.kind is FailureKind.UNREACHABLE
        said.append(str(caught.value))
    assert left() - before <= 3
    assert "3 calls before this one have not come back" in said[-1]
    os.close(os.open(tmp_path / "shard", os.O_RDWR))
    until(lambda: left() <= before)
    (tmp_path / "shard").unlink()
    (tmp_path / "shard").write_bytes(b"12345678")
    assert bytes(CancellableStore(str(tmp_path)).read("shard", 0, 8)) == b"12345678"


def test_a_silent_server_is_left(s3: S3Server, proxied: ObjectStoreProxy) -> None:
    url = s3.url("silent")
    open_store(url).put("shard", b"12345678")
    proxied.set(StoreFault("stall"))
    ends_when_closed(CancellableStore(url, PATIENT_S), lambda: proxied.fired["stall"] > 0)


def test_a_slow_server_has_all_the_time_it_needs(s3: S3Server, proxied: ObjectStoreProxy) -> None:
    """1.5 s, with a deadline of half a second."""
    url, body = s3.url("slow"), os.urandom(3 << 20)
    open_store(url).put("shard", body)
    proxied.set(StoreFault("slow", methods=("GET",), bytes_per_s=len(body) / 1.5))
    assert bytes(CancellableStore(url, deadline_s=0.5).read("shard", 0, len(body))) == body


class Breaking:
    """A backend whose streams break off after a piece, so many times."""

    def __init__(self, body: bytes, times: int) -> None:
        self.body, self.times = body, times
        self.asked: list[tuple[int, int]] = []

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[bytes]:
        self.asked.append((start, end))
        if len(self.asked) <= self.times:
            yield self.body[start : start + 2]
            raise ConnectionResetError("reset")
        yield self.body[start:end]


def test_an_attempt_goes_on_where_the_last_one_broke_off() -> None:
    backend: Any = Breaking(b"0123456789", 2)
    assert bytes(Store("x://", backend).read("k", 1, 9)) == b"12345678"
    assert backend.asked == [(1, 9), (3, 9), (5, 9)]


def test_a_connection_that_is_reset_costs_nothing(s3: S3Server, proxied: ObjectStoreProxy) -> None:
    url, body = s3.url("broken"), os.urandom(3 << 20)
    store = open_store(url)
    store.put("shard", body)
    proxied.set(StoreFault("reset", methods=("GET",), count=2))
    assert bytes(store.read("shard", 0, len(body))) == body
