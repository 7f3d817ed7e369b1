"""The controller's thread waits for the store of its run folder for a moment, and once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.controller import durability
from elastic_ft.controller.durability import NOT_DURABLE, Durability
from elastic_ft.errors import Superseded
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from tests.waiting import until

DEADLINE_S = 60.0


class BlackHole:
    """A backend whose puts are swallowed, until it is ``open`` again."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.open = backend, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put(self, *args: Any, **kwargs: Any) -> None:
        assert self.open.wait(DEADLINE_S)
        self._backend.put(*args, **kwargs)


class Durable:
    def __init__(self) -> None:
        self.folder = RunFolder(f"memory://t/{uuid4().hex}")
        self.folder.take_over("run1", "job")
        self.folder._stop_mirror.set()  # mirrored by hand
        self.posted: list[Any] = []
        self.hole = BlackHole(self.folder._store.backend)
        self.hole.open.set()
        self.folder._store.backend = self.hole  # type: ignore[assignment]
        self.durability = Durability(self.folder, {}, lambda *_: True, self.posted.append)
        self.durability.start()

    def told(self) -> float:
        """Returns how long the controller's thread waited."""
        began_s = time.monotonic()
        self.folder.record_inbox({"type": "A"})
        self.durability.now()
        return time.monotonic() - began_s

    def mirrored(self) -> int:
        store = open_store(self.folder.url)
        return store.get("inbox.jsonl").count(b"\n") if store.exists("inbox.jsonl") else 0


@pytest.fixture
def durable() -> Iterator[Durable]:
    one = Durable()
    yield one
    one.hole.open.set()
    one.durability.close()
    one.durability.join(DEADLINE_S)
    one.folder.close()


def test_what_lasts_waits_for_the_store(durable: Durable) -> None:
    for number in (1, 2, 3):
        durable.told()
        assert durable.mirrored() == number
    assert not durable.posted


def test_who_goes_on_from_it_finds_the_job_it_is_of(durable: Durable) -> None:
    """Else the next controller took the job for another one, and its workers for strangers."""
    durable.folder.write_job({"name": "job", "steps": 3})
    durable.told()
    assert b"steps: 3" in open_store(durable.folder.url).get("job.yaml")


def test_a_store_that_answers_nothing_is_waited_for_once(
    durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "NOW_S", 0.5)
    durable.hole.open.clear()
    assert 0.4 < durable.told() < DEADLINE_S / 2
    assert sum(durable.told() for _ in range(20)) < 5.0, "it is known to be away: not 0.5 s each"
    (note,) = durable.posted
    assert note.event == NOT_DURABLE and "not within 0.5 s" in note.reason
    durable.hole.open.set()
    until(lambda: durable.mirrored() == 21)
    until(lambda: not durable.durability._is_away)
    monkeypatch.setattr(durability, "NOW_S", DEADLINE_S)
    durable.told()
    assert durable.mirrored() == 22 and len(durable.posted) == 1


def test_a_successor_is_heard_of(durable: Durable) -> None:
    durable.told()
    owners.take_over(
        open_store(durable.folder.url), job="job", run="run2", run_folder=durable.folder.url
    )
    with pytest.raises(Superseded):
        durable.told()
