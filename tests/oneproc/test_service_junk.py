"""What is no HTTP, and who is gone in the middle of it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic_ft.service import api
from elastic_ft.service.access import Rights, new_token, read_token
from elastic_ft.service.bodies import BODY_MAX
from elastic_ft.service.floods import Room
from elastic_ft.service.service_client import ServiceAway
from tests.oneproc.served import JOB, WAIT_S, Served
from tests.oneproc.test_service_crowds import until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


def reached(served: Served) -> socket.socket:
    where = urlsplit(served.url)
    return socket.create_connection((where.hostname or "", where.port or 0), WAIT_S)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_junk_is_refused_and_leaves_nothing_in_the_log(
    served: Served, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sends it filled the log's disk, twenty lines for one."""
    with caplog.at_level(logging.DEBUG), reached(served) as stranger:
        stranger.sendall(junk)
        assert b" 400 " in stranger.recv(4096).splitlines()[0]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert served.client().jobs() == []


def test_who_is_gone_is_followed_by_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next sign of life, a quarter of a minute later: who comes again and again had all
    the places of one user in that time."""
    monkeypatch.setattr(api, "PING_EVERY_S", 1000.0)
    job = served.client().submit(JOB)["id"]
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(reached(served)) for _ in range(6)]
        for reader, kind in zip(readers, ("events", "steps") * 3, strict=True):
            asked = f"GET /api/v1/jobs/{job}/{kind} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            reader.sendall(asked.encode())
            assert b" 200 " in reader.recv(4096).splitlines()[0]
        until(lambda: served.api._streams._taken.total() == 6, "they follow")
        for reader in readers[:3]:  # half-closed: to this server they are gone, too
            reader.shutdown(socket.SHUT_WR)
        until(lambda: served.api._streams._taken.total() == 3, "they are let go")
    until(lambda: not served.api._streams._taken.total(), "nobody follows")


def test_bodies_under_way_have_room_for_others_too(tmp_path: Path) -> None:
    """Thousands of megabytes were kept of who sent jobs slowly, until there was no memory left."""
    users = {name: Rights(new_token(tmp_path / name), write=("*",)) for name in ("ann", "bob")}
    served = Served(tmp_path / "F", users)
    served.api._room = Room("bytes are being read", 3 * BODY_MAX, 2 * BODY_MAX)
    head = (
        "POST /api/v1/jobs HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {read_token(tmp_path / 'ann')}\r\n"
    )
    try:
        with contextlib.ExitStack() as slow:
            for more in (f"Content-Length: {BODY_MAX}", "Transfer-Encoding: chunked"):
                slow.enter_context(reached(served)).sendall(f"{head}{more}\r\n\r\n".encode())
            until(lambda: served.api._room._taken["ann"] == 2 * BODY_MAX, "they are read")
            ann, bob = (served.client(tmp_path / name) for name in ("ann", "bob"))
            with pytest.raises(ServiceAway, match=r"bytes are being read for ann already: ask "):
                ann.submit(JOB)
            assert ann.jobs() == []  # without a body
            assert bob.submit(JOB)["id"] == "tiny-1"
            served.api._room._all_max = 2 * BODY_MAX
            with pytest.raises(ServiceAway, match=r"^16777216 bytes are being read already"):
                bob.submit(JOB)
        until(lambda: not served.api._room._taken.total(), "who is gone has none")
        assert ann.submit(JOB)["id"] == "tiny-2"
    finally:
        served.close()


def test_a_body_that_nobody_reads_takes_no_room(served: Served) -> None:
    """Of those who follow, each with a body that is to come: none was left for a job."""
    served.api._room = Room("bytes are being read", 2 * BODY_MAX, 2 * BODY_MAX)
    job = served.client().submit(JOB)["id"]
    head = f"GET /api/v1/jobs/{job}/steps HTTP/1.1\r\nHost: localhost\r\n"
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            reader = opened.enter_context(reached(served))
            reader.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            assert b" 200 " in reader.recv(4096).splitlines()[0]
        assert served.client().submit(JOB)["id"] == "tiny-2"


def test_a_body_of_another_kind_is_not_read(served: Served) -> None:
    with reached(served) as stranger:
        head = "POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        stranger.sendall(f"{head}Content-Length: 8000000\r\n\r\n".encode())  # and nothing of it
        assert b" 415 " in stranger.recv(4096).splitlines()[0]
