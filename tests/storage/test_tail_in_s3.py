"""A remote run folder is read again and again: what was read is not downloaded again."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from chaos.s3_server import S3Server
from elastic_ft.observe import run_reader
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage.store import Store, open_store

NAME = "steps.jsonl"


def line(step: int, generation: int = 1) -> bytes:
    return json.dumps({"step": step, "generation": generation, "loss": 1 / step}).encode() + b"\n"


class Watched:
    """A growing file, who reads it, and the bytes that this costs."""

    def __init__(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_reader, "REMOTE_EVERY_S", 0.0)
        url = s3.url(uuid4().hex)
        self.store, self.tail = open_store(url), RunReader(url).tail(NAME)
        self.requests, self.downloaded, get = 0, 0, Store.get

        def counted(store: Store, *args: Any) -> bytes:
            self.requests += 1
            found = get(store, *args)
            self.downloaded += len(found)
            return found

        monkeypatch.setattr(Store, "get", counted)

    def reads(self) -> list[int]:
        self.requests = self.downloaded = 0
        return [found["step"] for found in self.tail.read()]


@pytest.fixture
def watched(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(s3, monkeypatch)


def test_what_was_read_is_not_downloaded_again(watched: Watched) -> None:
    """The whole tail came with each look: up to 16 MB every 2 s, of each job."""
    content = b"".join(map(line, range(1, 1001)))
    watched.store.put(NAME, content)
    assert watched.reads() == list(range(1, 1001))
    for step in (1001, 1002):
        content += line(step)
        watched.store.put(NAME, content)
        assert watched.reads() == [step]
        assert (watched.requests, watched.downloaded) == (1, len(line(step - 1) + line(step)))
    assert watched.reads() == []
    assert (watched.requests, watched.downloaded) == (1, len(line(1002)))


@pytest.mark.parametrize("steps", [3, 5, 9])
def test_a_file_that_was_cut_back_is_read_from_its_beginning(watched: Watched, steps: int) -> None:
    """One that had grown beyond what was read by the next look was read on from there: steps were
    left out, or half a line ended the reading."""
    watched.store.put(NAME, b"".join(map(line, range(1, 6))))
    assert watched.reads() == [1, 2, 3, 4, 5]
    again = [line(1), line(2), *(line(step, generation=20) for step in range(3, steps + 1))]
    watched.store.put(NAME, b"".join(again))
    assert watched.reads() == list(range(1, steps + 1))
    assert watched.reads() == []


def test_a_file_that_goes_on_in_segments(watched: Watched) -> None:
    watched.store.put(NAME, line(1) + line(2))
    assert watched.reads() == [1, 2]
    watched.store.put(f"segments/{NAME}/{1:015}", line(1) + line(2) + line(3))
    watched.store.put(NAME, line(4))
    assert watched.reads() == [3, 4]
    watched.store.put(NAME, line(4) + line(5))
    assert watched.reads() == [5]
    assert watched.requests == 1


def test_a_file_that_is_gone_comes_again(watched: Watched) -> None:
    watched.store.put(NAME, line(1))
    assert watched.reads() == [1]
    watched.store.delete(NAME)
    assert watched.reads() == []
    watched.store.put(NAME, line(1) + line(2))
    assert watched.reads() == [2]
