"""A worker's line to its controllers, over real sockets: whom it follows, and when it ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.assignment import Keeper, Member
from elastic_ft.core.commands import DropKept, ReleaseWorker, UseKeeper
from elastic_ft.core.events import StepApplied
from elastic_ft.errors import StoreFailed
from elastic_ft.faults import Points
from elastic_ft.storage.store import Store, open_store
from elastic_ft.transport import succession
from elastic_ft.transport.control import Hello, Note, connect
from elastic_ft.transport.lifeline import SAME_MAX, Lifeline
from elastic_ft.transport.succession import Search, parse_address
from elastic_ft.worker.line import ControllerLine, ControllerLost, Hooks
from tests.oneproc.realms import MEMBER, SOON_S, Realm, Reigning, pulsing


@pytest.fixture
def realm(tmp_path: Path) -> Iterator[Realm]:
    made = Realm(tmp_path / "store")
    yield made
    for close in reversed(made.closing):
        close()


def reading(lifeline: Lifeline) -> threading.Thread:
    """Reads until there is nobody to read of."""

    def read() -> None:
        with contextlib.suppress(EOFError):
            while True:
                lifeline.receive()

    made = threading.Thread(target=read, daemon=True)
    made.start()
    return made


def raises(*_: object) -> None:
    raise OverflowError("what nobody thought of")


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999999999", "x", ""])
def test_a_port_that_is_none_is_no_address(port: str) -> None:
    with pytest.raises(ValueError):
        parse_address(f"127.0.0.1:{port}")


def test_who_has_no_address_to_call_is_passed_over(realm: Realm) -> None:
    realm.take_over("127.0.0.1:1")
    realm.take_over("127.0.0.1:99999")
    search = realm.search()
    assert search.run(0.1, threading.Event()) is None
    assert "has no port below 65,536" in search._trouble


def test_what_goes_wrong_in_looking_for_a_controller_is_the_lines_end(realm: Realm) -> None:
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    lifeline.start(raises)
    first.server.close()
    realm.reigning()
    with pytest.raises(EOFError, match="OverflowError: what nobody thought of"):
        lifeline.receive()
    assert lifeline.await_room(SOON_S)


def test_a_worker_does_not_wait_for_ever_for_what_it_told_to_be_durable(
    realm: Realm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller lives, and can write nothing."""
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    monkeypatch.setattr(lifeline._outbox, "_kept_max", 2)
    hooks = Hooks(lambda: 0, raises, lambda welcome: None)
    line = ControllerLine(lifeline, MEMBER, Points("w0", (), lambda index: None), hooks, 1.0)
    realm.closing.append(line.close)
    elastic = line._elastic.model_copy(update={"suspend_timeout_s": 0.1})
    monkeypatch.setattr(line, "_elastic", elastic)
    applied = [StepApplied(0.0, "w0", 1, step, {}) for step in (1, 2, 3)]
    assert line.send(applied[0]) and line.send(applied[1])
    with pytest.raises(ControllerLost, match="no controller has made durable what it was told"):
        line.send(applied[2])


def test_what_a_worker_can_not_do_is_the_lines_end(realm: Realm) -> None:
    """The thread that reads died of it, and the worker trained on for ever."""
    first = realm.reigning()
    points = Points("w0", (), lambda index: None)
    hooks = Hooks(lambda: 0, raises, lambda welcome: None)
    line = ControllerLine(realm.lifeline(first), MEMBER, points, hooks, 1.0)
    realm.closing.append(line.close)
    line.start()
    first.wait(bool)  # welcomed
    assert first.server.send("w0", UseKeeper("w0", Keeper("n0", ("127.0.0.1", 1))))
    assert line.await_over(SOON_S)


class SlowStore:
    """Of the first look at an owner's object the answer comes when it is let out."""

    def __init__(self, store: Store) -> None:
        self._store, self.asked, self.answers = store, threading.Event(), threading.Event()
        self.url, self.url_of = store.url, store.url_of

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        if not self.asked.is_set():
            self.asked.set()
            assert self.answers.wait(SOON_S)
        return found


def test_a_late_answer_about_the_last_controller_does_not_end_the_line_to_the_next(
    realm: Realm,
) -> None:
    first = realm.reigning()
    lifeline, slow = realm.lifeline(first), SlowStore(realm.store)
    lifeline._store = lambda _: realm.store  # type: ignore[method-assign]
    lifeline._succession._store = lambda _: slow  # type: ignore[assignment, return-value]
    second = realm.reigning()
    lifeline.start(lambda welcome: None)
    heard: list[Any] = []
    reader = threading.Thread(target=lambda: heard.append(lifeline.receive()), daemon=True)
    reader.start()
    assert slow.asked.wait(SOON_S), "the first one is silent"
    first.server.close()
    second.wait(bool)
    slow.answers.set()
    assert not second.ended.wait(0.5), "it has just called"
    assert second.server.send("w0", DropKept("n0", "w0"))
    reader.join(SOON_S)
    assert heard == [DropKept("n0", "w0")]


def test_a_successor_that_says_nothing_is_left_for_the_next_one(realm: Realm) -> None:
    """Stopped after the handshake, it kept everybody for the whole of controller_timeout_s."""
    realm.successor_s = 60.0
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    stopped = realm.stopped()
    first.server.close()
    reader = reading(lifeline)
    assert stopped.wait(SOON_S), "it is called"
    third = realm.reigning()
    third.wait(bool)
    assert third.messages == [Hello(MEMBER, lifeline._hello.life, owner=1)]
    lifeline.close()
    reader.join(SOON_S)
    assert not reader.is_alive()


def test_who_is_to_end_does_not_wait_for_a_welcome(realm: Realm) -> None:
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    stopped = realm.stopped()
    first.server.close()
    reader = reading(lifeline)
    assert stopped.wait(SOON_S)
    lifeline.close()
    reader.join(SOON_S / 2)
    assert not reader.is_alive()


def note(size: int = 4000) -> Note:
    return Note("w0", 1, "x", "y" * size)


@pytest.mark.soak  # by the clock: on a busy machine its limits are too short
def test_a_controller_that_is_stopped_and_goes_on_is_told_what_it_missed(realm: Realm) -> None:
    """Its buffers were full: training stood still, and then the kernel ended the connection."""
    first = realm.stopping()
    lifeline = realm.lifeline(first)
    lifeline.start(lambda welcome: None)
    reader, number, until_s = reading(lifeline), 0, time.monotonic() + SOON_S
    while lifeline.send(note(10)):
        number += 1
        assert time.monotonic() < until_s
        time.sleep(0.01)
    began_s = time.monotonic()
    assert not any(lifeline.send(note()) for _ in range(5000))  # 20 MB
    assert time.monotonic() - began_s < SOON_S / 2, "who trains does not wait"
    assert reader.is_alive() and not first.ended.wait(2 * realm.timeout_s), "nor is it cut off"
    first.goes_on.set()
    first.wait(lambda heard: len(heard) == number + 5001)
    assert [message.number for message in first.messages] == [*range(1, number + 5002)]
    assert reader.is_alive() and not first.ended.is_set()


def test_who_takes_nothing_is_left_and_the_next_one_told(
    realm: Realm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is silent, and followed: until then who trains holds back what it has to tell."""
    monkeypatch.setattr("elastic_ft.transport.control.SEND_TIMEOUT_S", 0.3)
    first = realm.stopping()
    lifeline = realm.lifeline(first)
    lifeline.start(lambda welcome: None)
    reader, number, began_s = reading(lifeline), 1, time.monotonic()
    while lifeline.send(note(50_000)):
        number += 1
        assert number < 10_000
    assert time.monotonic() - began_s < SOON_S
    second = realm.reigning()
    with pulsing(second.server.send_all):
        second.wait(lambda heard: len(heard) == number + 1)
    assert [message.number for message in second.messages[1:]] == [*range(1, number + 1)]
    assert lifeline.welcome.owner == 2 and reader.is_alive()
    first.goes_on.set()
    assert first.ended.wait(SOON_S), "it knows that it has lost us"


@pytest.fixture
def of_a_keeper(realm: Realm) -> tuple[Reigning, Lifeline]:
    first = realm.reigning()
    lifeline = Lifeline(first.address, realm.key, Member("keeper:n0", "n0", "localhost", 1))
    realm.closing.append(lifeline.close)
    lifeline.keeper = Keeper("n0", ("127.0.0.1", 1))
    return first, lifeline


def test_a_keeper_whose_line_alone_ends_calls_again(
    realm: Realm, of_a_keeper: tuple[Reigning, Lifeline]
) -> None:
    """It looked for a successor of a controller that lived, for the whole of controller_timeout_s,
    and saved and ended then: its node was without a keeper."""
    realm.successor_s = 60.0
    first, lifeline = of_a_keeper
    reader, keeper = reading(lifeline), lifeline.keeper
    lifeline.send(note(1))
    first.wait(lambda heard: len(heard) == 2)
    first.server.hang_up("keeper:n0")
    first.wait(lambda heard: len(heard) == 4)
    called, told = first.messages[2:]
    assert (called.owner, called.keeper, told.number) == (1, keeper, 1)
    first.server.close()
    second = realm.reigning()
    second.wait(lambda heard: len(heard) == 2)
    assert lifeline.welcome.owner == 2 and reader.is_alive()
    second.server.hang_up("keeper:n0")
    second.wait(lambda heard: len(heard) == 4)


def test_a_controller_that_hangs_up_again_and_again_is_left(
    realm: Realm, of_a_keeper: tuple[Reigning, Lifeline]
) -> None:
    """A message that it refuses would come for ever."""
    realm.successor_s = 1.0
    first, lifeline = of_a_keeper
    reader = reading(lifeline)
    for calls in range(1, SAME_MAX + 2):
        first.wait(lambda heard, calls=calls: len(heard) == calls)
        first.server.hang_up("keeper:n0")
    reader.join(SOON_S)
    assert not reader.is_alive() and len(first.messages) == SAME_MAX + 1


def test_a_keeper_that_was_dismissed_does_not_come_back(realm: Realm) -> None:
    """Cut off while it was told so, it would take the place of the one that has its own."""
    first = realm.reigning()
    hello = Hello(Member("keeper:n0", "n0", "localhost", 1), "life")
    last = ReleaseWorker("keeper:n0", "it was replaced")
    unheard, _ = connect(first.address, realm.key, hello)
    first.wait(bool)
    first.server.dismiss("keeper:n0", last)
    unheard.close()
    successor, _ = connect(first.address, realm.key, replace(hello, life="another"))
    first.wait(lambda heard: len(heard) == 2)
    again, _ = connect(first.address, realm.key, replace(hello, owner=1))
    assert again.receive(SOON_S) == last
    assert first.server.send("keeper:n0", DropKept("n0", "w0"))
    assert successor.receive(SOON_S) == DropKept("n0", "w0")
    assert len(first.messages) == 2 and not first.ended.is_set()
    again.close()
    successor.close()


def test_a_worker_whose_line_ends_waits_for_the_next_controller(realm: Realm) -> None:
    """It is lost, and may not come back (I1)."""
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    reading(lifeline)
    first.wait(bool)
    first.server.hang_up("w0")
    assert first.ended.wait(SOON_S)
    realm.reigning().wait(bool)
    assert len(first.messages) == 1


class Clock:
    """What ``succession`` has of ``time``."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class TakesItsTime:
    """A store each call of which takes ``takes_s``, or all that it may, if that is less."""

    def __init__(self, store: Store, clock: Clock, takes_s: float) -> None:
        self.url, self._store, self._clock, self._takes_s = store.url, store, clock, takes_s
        self._deadline_s = 0.0

    def within(self, deadline_s: float) -> Any:
        self._deadline_s = deadline_s
        return self

    def get(self, key: str) -> bytes:
        self._clock.now_s += min(self._takes_s, self._deadline_s)
        if self._takes_s > self._deadline_s:
            raise StoreFailed(f"{key}: no answer for {self._deadline_s:g} s")
        return self._store.get(key)


@pytest.mark.parametrize("within_s", [60.0, 12.0], ids=["in time", "begun in time"])
def test_a_store_that_is_slow_tells_of_a_successor_all_the_same(
    realm: Realm, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    """Its workers never found it, and were given up with 30 committed steps. Nor is a look cut to
    the time that is left when it begins: after one of 5 s, 8 of the 7 that are left."""
    monkeypatch.setattr(succession, "time", clock := Clock())
    realm.take_over("127.0.0.1:1")
    realm.reigning()
    slow = TakesItsTime(realm.store, clock, 8.0)
    search = realm.search(store=slow.within)
    found = search.run(within_s, threading.Event())
    assert found, search._trouble
    found[0].close()


class MuteStore:
    def __init__(self) -> None:
        self.url = "s3://bucket/job"

    def get(self, key: str) -> bytes:
        raise StoreFailed(f"{key}: nothing answers")


def test_who_can_read_the_store_is_not_cut_off(realm: Realm) -> None:
    """A controller's machine lost its power: its next one came too late for all workers."""
    realm.url = f"memory://{realm.key.secret.hex()}"
    realm.store = open_store(realm.url)
    first = realm.reigning()
    lifeline = realm.lifeline(first)
    lifeline.cut_off_s = 0.3
    reader, began_s = reading(lifeline), time.monotonic()
    lifeline._channel._unheard = True  # as a sender is told by the kernel
    first.server.close()
    reader.join(4 * lifeline.cut_off_s)
    assert reader.is_alive(), "it looks on"
    second = realm.reigning()
    second.wait(bool)
    assert time.monotonic() - began_s > 4 * lifeline.cut_off_s


@pytest.mark.parametrize("remote", [True, False])
def test_who_can_read_no_store_may_be_cut_off_and_ends_soon(realm: Realm, remote: bool) -> None:
    """A folder may be its machine's own: it is read all the same."""
    realm.take_over("127.0.0.1:1")
    store = MuteStore() if remote else realm.store
    hello, began_s = Hello(MEMBER, owner=1), time.monotonic()
    search = Search(lambda _: store, realm.key, hello, 1.0, remote=remote)  # type: ignore[arg-type, return-value]
    assert search.run(60.0, threading.Event(), unread_s=0.3) is None
    assert time.monotonic() - began_s < SOON_S
