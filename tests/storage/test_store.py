"""The store's promises, on a folder, in memory and on a real S3 server."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import known_implementations

from chaos.s3_server import S3Server
from elastic_ft.errors import StorageError, StoreFailed
from elastic_ft.storage import local_files
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, check_access, open_store


def test_objects_come_back_as_they_were_put(url: str) -> None:
    store = open_store(url)
    store.put("a/b", b"0123456789")
    store.put("a/c", [memoryview(b"xy"), b"", bytearray(b"z")])
    store.put("a/empty", b"")
    assert store.get("a/b") == b"0123456789"
    assert store.get("a/c") == b"xyz"
    assert store.get("a/empty") == b""
    assert store.size("a/b") == 10
    store.put("a/b", b"new")
    assert store.get("a/b") == b"new"


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, b"012"),
        (7, 10, b"789"),
        (8, 99, b"89"),
        (50, 60, b""),
        (4, 4, b""),
        (6, None, b"6789"),
    ],
)
def test_ranges(url: str, start: int, end: int | None, expected: bytes) -> None:
    store = open_store(url)
    store.put("x", b"0123456789")
    assert store.get("x", start, end) == expected


def test_listing_is_by_folder_and_sorted(url: str) -> None:
    store = open_store(url)
    assert store.list() == store.list("data") == []
    for key in ("data/b/2", "data/b/1", "data/a", "data-too", "datax/1"):
        store.put(key, b"1")
    assert store.list("data") == ["data/a", "data/b/1", "data/b/2"]
    assert store.list("data/b") == store.list("data/b/") == ["data/b/1", "data/b/2"]
    assert store.list() == ["data-too", "data/a", "data/b/1", "data/b/2", "datax/1"]
    assert store.list("data", "data/a") == ["data/b/1", "data/b/2"]
    assert store.list("data", "data/b/1x") == store.list("data/b", "data/b/1") == ["data/b/2"]
    assert store.list("data", "data/b/2") == store.list("data/b", "x") == []


def test_delete_takes_the_folder_and_no_neighbour(url: str) -> None:
    store = open_store(url)
    for key in ("p/1", "p/q/2", "p2/3", "r"):
        store.put(key, b"1")
    store.delete("p")
    store.delete("r")
    store.delete("never-there")
    assert store.list() == ["p2/3"]
    assert not store.exists("p/1")
    assert store.exists("p2/3")
    with pytest.raises(ValueError, match="everything"):
        store.delete("")


def test_missing_is_told_from_failed(url: str) -> None:
    store = open_store(url)
    store.put("folder/x", b"1")
    assert not store.exists("folder")
    for attempt in (store.get, store.size):
        with pytest.raises(StoreFailed) as caught:
            attempt("nothing")
        assert isinstance(caught.value, StoreError)
        assert caught.value.kind is FailureKind.MISSING
        assert "\n" not in str(caught.value)


def test_one_winner_of_eight(url: str) -> None:
    stores = [open_store(url) for _ in range(8)]
    start = threading.Barrier(8)

    def write(number: int) -> bool:
        start.wait(30)
        return stores[number].put_if_absent("m/1.json", f"writer {number}".encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert sum(won) == 1, won
    assert stores[0].get("m/1.json") == f"writer {won.index(True)}".encode()
    assert stores[0].list() == ["m/1.json"]


def test_many_threads_share_a_store(url: str) -> None:
    store = open_store(url)

    def round_trip(number: int) -> bool:
        data = os.urandom(10_000 + number)
        store.put(f"k{number}", memoryview(data))
        return store.get(f"k{number}") == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(40)))


@pytest.mark.parametrize("key", ["/abs", "../up", "a/../../b"])
def test_keys_stay_inside(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        open_store(str(tmp_path)).put(key, b"")


# ------------------------------------------------------------------------ local folders


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_torn_local_write_is_invisible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Dies half-way, as by a full disk: neither a part nor a temporary file is seen."""

    def write_half(file: Any, part: bytes) -> None:
        file.write(part[: len(part) // 2])
        raise OSError(28, "No space left on device")

    store = open_store(str(tmp_path))
    store.put("old", b"old")
    monkeypatch.setattr(local_files, "_write_all", write_half)
    for key in ("new", "old"):
        with pytest.raises(StoreError, match=r": failed: No space left on device$"):
            getattr(store, method)(key, b"0123456789")
    assert store.list() == ["old"]
    assert store.get("old") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_leftovers_of_a_killed_writer_are_unseen_and_go_with_their_folder(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("data/run/r0", b"1")
    (tmp_path / "data/run/.r1.abc.tmp~").write_bytes(b"half")
    assert store.list() == ["data/run/r0"]
    store.delete("data/run")
    assert not (tmp_path / "data/run").exists()


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        check_access(f"{tmp_path}/file/below")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- retries, deadlines


class Flaky:
    """A backend whose next calls of ``get`` raise; counts them."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self.errors = list(errors)
        self.calls = 0

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> bytes:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return b"good"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(f"{name} was not expected")


def test_a_broken_connection_is_retried_and_a_refusal_is_not() -> None:
    flaky: Any = Flaky([ConnectionResetError("reset"), TimeoutError()])
    assert Store("x://", flaky).get("k") == b"good"
    assert flaky.calls == 3
    refusing: Any = Flaky([PermissionError("no")])
    with pytest.raises(StoreError) as caught:
        Store("x://", refusing).get("k")
    assert (caught.value.kind, refusing.calls) == (FailureKind.FORBIDDEN, 1)


def test_retries_are_bounded_by_number_and_by_deadline() -> None:
    endless: Any = Flaky([ConnectionResetError("reset")] * 100)
    with pytest.raises(StoreError, match=r"unreachable.*3 attempts"):
        Store("x://", endless, attempts=3).get("k")
    assert endless.calls == 3
    with pytest.raises(StoreError, match="unreachable"):
        Store("x://", endless, deadline_s=0.3).get("k")
    assert endless.calls == 5


def test_store_errors_cross_processes() -> None:
    copy = pickle.loads(pickle.dumps(StoreError("cannot read x", FailureKind.BUSY)))
    assert (str(copy), copy.kind) == ("cannot read x", FailureKind.BUSY)


# --------------------------------------------------------------------------- check_access


def test_access_is_good(url: str) -> None:
    assert check_access(url) == ()
    assert open_store(url).list() == []


def _refusal(url: str) -> str:
    with pytest.raises(StorageError) as caught:
        check_access(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_keys_are_forbidden(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "forbidden: SignatureDoesNotMatch" in _refusal(s3.url("x"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "forbidden: InvalidAccessKeyId" in _refusal(s3.url("x"))


def test_no_keys_are_forbidden(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    assert "forbidden: NoCredentialsError" in _refusal(s3.url("x"))


@pytest.mark.usefixtures("s3")
def test_missing_bucket_is_named() -> None:
    assert "no such bucket: NoSuchBucket" in _refusal("s3://no-such-bucket/x")


def test_nobody_listening_is_unreachable_at_once(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # bound, not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        start_s = time.monotonic()
        assert "unreachable" in _refusal(s3.url("x"))
        assert time.monotonic() - start_s < 15


def test_a_server_that_is_away_is_no_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's walk takes what it can't list for empty."""
    monkeypatch.setattr("elastic_ft.storage.store.PAUSES_S", (0.0,))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        store = open_store(f"http://127.0.0.1:{bound.getsockname()[1]}/x")
        with pytest.raises(StoreError) as caught:
            store.list("manifests")
    assert caught.value.kind is FailureKind.UNREACHABLE


def test_a_silent_endpoint_ends_by_the_deadline(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:  # accepts in its backlog, never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = open_store(s3.url("x"), deadline_s=2)
        start_s = time.monotonic()
        for attempt in (lambda: store.get("k"), lambda: store.put_if_absent("k", b"1")):
            with pytest.raises(StoreError) as caught:
                attempt()
            assert caught.value.kind is FailureKind.UNREACHABLE
        assert time.monotonic() - start_s < 15


@pytest.mark.parametrize("url", ["nonsense://x/y", "s4://bucket", "simplecache::s4://bucket"])
def test_unknown_protocols_are_refused(url: str) -> None:
    """It said "ValueError: Protocol not known", and not what there is."""
    with pytest.raises(StorageError, match=r" is not known: expected a path, s3://, .*fsspec's"):
        open_store(url)


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"class": "nowhere.Nothing", "err": "Install nowhere to read it"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    with pytest.raises(StorageError, match=r"^absent://c/x: Install nowhere to read it$"):
        open_store("absent://c/x")
