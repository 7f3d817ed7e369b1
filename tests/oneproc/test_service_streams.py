"""Many who follow jobs at once: others are answered in between; who reads nothing costs little."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from elastic_ft.service import api
from elastic_ft.service.line_stream import LineStream
from tests.oneproc.served import JOB, Served, told
from tests.waiting import until

STEPS = 40_000  # as lines, more than a socket holds


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    told(tmp_path / "F/jobs/tiny-1", STEPS)
    served = Served(tmp_path / "F")
    assert served.client().submit(JOB)["id"] == "tiny-1"
    until(lambda: served.service.story("tiny-1").committed == STEPS)
    yield served
    served.close()


def follow(served: Served, followers: contextlib.ExitStack) -> None:
    """Somebody asks for all steps, and reads none of them."""
    where = urlsplit(served.url)
    follower = followers.enter_context(socket.socket())
    follower.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    follower.connect((where.hostname or "", where.port or 0))
    follower.sendall(b"GET /api/v1/jobs/tiny-1/steps HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_between_two_pieces_of_streams_others_are_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand streams each had a piece in one round of the loop: a question took 24 s."""
    pieces, rounds = list[int](), [0]
    since = LineStream.since

    def told_in(stream: LineStream, *asked: Any) -> Any:
        found = since(stream, *asked)
        if found[0]:
            pieces.append(rounds[0])
        return found

    async def count() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(LineStream, "since", told_in)
    counting = asyncio.run_coroutine_threadsafe(count(), served._loop)
    with contextlib.ExitStack() as followers:
        for _ in range(20):
            follow(served, followers)
        until(lambda: len(pieces) >= 40)
    counting.cancel()
    assert len(set(pieces)) == len(pieces)


def test_who_reads_nothing_is_sent_little(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel took megabytes for each, up to all that it has for the machine's connections."""
    taken: list[int] = []
    since = LineStream.since

    def told_in(stream: LineStream, *asked: Any) -> Any:
        found = since(stream, *asked)
        taken.append(len(found[0]))
        return found

    monkeypatch.setattr(LineStream, "since", told_in)
    monkeypatch.setattr(api, "TAKEN_WITHIN_S", 3.0)
    with contextlib.ExitStack() as followers:
        follow(served, followers)
        for wanted in (1, 0):
            until(lambda wanted=wanted: served.api._streams._taken.total() == wanted)  # type: ignore[misc]
    assert 0 < sum(taken) < STEPS // 10
