"""A second service of a folder, on another machine or cluster: it is told that the first one lives,
by signs in the folder alone, and takes over from a dead one, or on purpose."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.errors import UsageError
from elastic_ft.service import service, service_sign
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service import Service
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from tests.oneproc.served import JOB, TERMS, WAIT_S, ServedApart, no_cluster

Begin = Callable[..., Service]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign a moment; who is dead is known within seconds."""
    monkeypatch.setattr(service_sign, "EVERY_S", 0.1)
    monkeypatch.setattr(service_sign, "STILL_S", 4.0)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """A service of one folder, as each machine would begin it."""
    begun = list[Service]()

    def made(**how: Any) -> Service:
        one = Service(str(tmp_path / "F"), TERMS, no_cluster, lost.append, Sight, **how)
        one.url = "http://here:1"
        begun.append(one)
        one.start()
        return one

    lost = list[object]()
    yield made
    for one in begun:
        one.close()


def works(one: Service) -> str:
    return one.submit({"job": JOB}, "").result(WAIT_S)


def test_one_that_lives_keeps_its_folder(begin: Begin) -> None:
    first = begin()
    with pytest.raises(
        UsageError, match=r"--folder: .* alive at http://here:1, .*--take-over"
    ) as e:
        begin()
    assert "\n" not in str(e.value)
    assert works(first) == "tiny-1"


def test_its_clock_does_not_matter(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time
    monkeypatch.setattr(service_sign.time, "time", lambda: now_s() - 86_400)
    begin()
    monkeypatch.setattr(service_sign.time, "time", now_s)
    with pytest.raises(UsageError, match=r"alive at .*, and has run for \d s "):
        begin()


def test_it_is_taken_over_on_purpose(begin: Begin) -> None:
    first = begin()
    second = begin(take_over=True)
    assert works(second) == "tiny-1"
    with pytest.raises(Exception, match=r"superseded|the service ends"):
        works(first)


def test_one_that_ended_in_good_order_is_not_waited_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_sign, "STILL_S", 10 * WAIT_S)
    begin().close()
    began_s = time.monotonic()
    begin()
    assert time.monotonic() - began_s < WAIT_S


def test_the_same_actor_goes_on_at_once(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has made it again: the one before it is gone."""
    monkeypatch.setattr(service_sign, "STILL_S", 10 * WAIT_S)
    begin(actor="a")
    began_s = time.monotonic()
    begin(actor="a")
    assert time.monotonic() - began_s < WAIT_S
    with pytest.raises(UsageError, match="alive at"):  # which another one has taken over meanwhile
        begin(actor="b")


@pytest.mark.parametrize("how", ["kill", "stand_still"])
def test_one_that_makes_no_signs_is_taken_over(begin: Begin, tmp_path: Path, how: str) -> None:
    first = ServedApart(tmp_path / "F")
    try:
        getattr(first, how)()
        assert works(begin()) == "tiny-1"
    finally:
        first.close()


def test_of_two_that_follow_a_dead_one_the_first_stays(begin: Begin, tmp_path: Path) -> None:
    owners.take_over(open_store(str(tmp_path / "F")), job=service.OWNER, run="r", run_folder="")
    both = threading.Barrier(2)

    def follow() -> Service:
        both.wait(WAIT_S)
        return begin()

    with ThreadPoolExecutor(2) as pool:
        asked: list[Future[Service]] = [pool.submit(follow) for _ in range(2)]
        errors = [each.exception(WAIT_S) for each in asked]
    (refused,) = [error for error in errors if error is not None]
    assert isinstance(refused, UsageError) and "alive" in str(refused)


def test_a_sign_that_is_none_is_no_sign(begin: Begin, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "F"))
    owners.take_over(store, job=service.OWNER, run="r", run_folder="")
    odd = service_sign.ServiceSign("r", 1, "h", 1, "", 1e300, 0.0)
    for junk in (b"", b"[]", b'{"run": "r"}', b"\xff", json.dumps(asdict(odd)).encode()):
        store.put(service_sign.NAME, junk)
        assert service_sign.sign_in(store) is None
    assert works(begin()) == "tiny-1"
