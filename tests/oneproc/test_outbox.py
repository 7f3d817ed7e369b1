"""What a worker tells is kept until it is durable, told again in order, and never twice."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.controller.inheritance import backwards, beginnings, up_to
from elastic_ft.core.assignment import Member
from elastic_ft.core.events import StepApplied, StepHeld
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from elastic_ft.transport import outbox as outboxes
from elastic_ft.transport.control import TO_CONTROLLER, TO_WORKER, Heartbeat, Hello, Note
from elastic_ft.transport.handshake import Session
from elastic_ft.transport.messages import Encoded, MessageRefused, Numbered, pack
from elastic_ft.transport.outbox import LineOutbox
from elastic_ft.transport.succession import Search, format_address, parse_address
from elastic_ft.transport.tls import new_key
from elastic_ft.transport.wire import Channel

WAIT_S, SECRET = 60.0, b"s" * 32
REST = 2000  # messages, 10 MB: more than buffers hold that were full
MEMBER = Member("w0", "n0", "host", 1)


class Wire:
    """A channel's sending end; it ends after ``most`` messages."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.sent, self.pieces = most, list[Any](), 0
        self.room, self.goes_on = True, threading.Event()  # it has; what is sent arrives
        self.goes_on.set()

    def has_room(self, timeout_s: float) -> bool:
        return self.room

    def send(self, *messages: Any) -> bool:
        self.goes_on.wait()
        self.pieces += 1
        for message in messages:
            if len(self.sent) == self.most:
                return False
            body = message.body if isinstance(message, Encoded) else Encoded(message).body
            self.sent.append(TO_CONTROLLER.decode(body))
        return True

    def numbers(self) -> list[int]:
        return [found.number for found in self.sent if isinstance(found, Numbered)]


def outbox(wire: Wire, **kwargs: Any) -> LineOutbox:
    return LineOutbox(wire, **kwargs)  # type: ignore[arg-type]


def held(step: int) -> StepHeld:
    return StepHeld(0.0, "w0", 1, step)


def applied(step: int) -> StepApplied:
    return StepApplied(0.0, "w0", 1, step, {"loss": 1.0 / step})


def steps(wire: Wire) -> list[int]:
    said = [found.message if isinstance(found, Numbered) else found for found in wire.sent]
    return [message.step for message in said if isinstance(message, StepApplied)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """It stands still."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(outboxes, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.mark.parametrize("keeps", [True, False])
def test_words_of_short_steps_go_out_together(clock: SimpleNamespace, keeps: bool) -> None:
    """Each woke a thread of the controller's: at steps of 60 ms a percent of what they took."""
    wire = Wire()
    box = outbox(wire, keeps=keeps)
    for step in range(1, 101):
        assert box.send(applied(step))
        clock.now_s += 0.06
    assert steps(wire) == list(range(1, len(steps(wire)) + 1)) and len(steps(wire)) > 95
    assert wire.pieces == 25
    assert wire.numbers() == (list(range(1, len(steps(wire)) + 1)) if keeps else [])


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("other", [held(3), Heartbeat("w0", 1, 1, 1, "forward")])
def test_whatever_is_said_takes_along_the_steps_before_it(
    clock: SimpleNamespace, keeps: bool, other: Any
) -> None:
    wire = Wire()
    box = outbox(wire, keeps=keeps)
    for step in (1, 2, 3):
        box.send(applied(step))
    assert steps(wire) == [1]
    assert box.send(other)
    assert steps(wire) == [1, 2, 3]
    said = wire.sent[-1].message if isinstance(wire.sent[-1], Numbered) else wire.sent[-1]
    assert said == other
    box.send(applied(4))  # after a word of its own the next step's does not wait
    assert steps(wire) == ([1, 2, 3, 4] if isinstance(other, StepHeld) else [1, 2, 3])


def test_steps_that_wait_are_told_the_next_controller_and_not_twice(
    clock: SimpleNamespace,
) -> None:
    first, last = Wire(), Wire()
    box = outbox(first)
    for step in (1, 2, 3):
        box.send(applied(step))
    box.catch_up()  # nothing is held back: what waits is no matter of the thread that hears
    assert steps(first) == [1]
    assert box.go_on(last, heard=1) == 2  # type: ignore[arg-type]
    assert last.numbers() == [2, 3]
    box.send(held(4))
    assert last.numbers() == [2, 3, 4]


def test_steps_that_wait_are_held_back_with_the_rest_where_there_is_no_room(
    clock: SimpleNamespace,
) -> None:
    wire = Wire()
    box = outbox(wire)
    for step in (1, 2, 3):
        box.send(applied(step))
    wire.room = False
    assert not box.send(held(4)) and not box.send(applied(5))
    wire.room = True
    assert not box.send(applied(6)), "who was held back before comes first"
    box.catch_up()
    assert wire.numbers() == list(range(1, 7))


def test_a_step_that_is_no_message_is_refused_at_once(clock: SimpleNamespace) -> None:
    box = outbox(Wire(), keeps=False)
    box.send(applied(1))
    with pytest.raises(TypeError, match="no plain value"):
        box.send(StepApplied(0.0, "w0", 1, 2, {"odd": object()}))
    assert box.send(applied(3)) and box.send(held(3))


def test_the_next_controller_is_told_what_the_last_one_had_not_made_durable() -> None:
    first, last = Wire(most=4), Wire()
    box = outbox(first)
    assert [box.send(held(step)) for step in range(1, 7)] == [True] * 4 + [False] * 2
    box.acknowledge(2)
    assert box.go_on(last, heard=3) == 3  # type: ignore[arg-type]
    assert last.numbers() == [4, 5, 6]
    box.send(held(7))
    assert last.sent[-1] == Numbered(7, held(7))


def test_what_is_of_the_moment_has_no_number_and_is_not_told_again() -> None:
    first, last = Wire(), Wire()
    box = outbox(first)
    box.send(Heartbeat("w0", 1, 1, 1, "forward"))
    assert first.numbers() == [] and box.go_on(last, heard=0) == 0  # type: ignore[arg-type]
    assert last.sent == []


def test_nothing_is_dropped_where_too_much_is_kept() -> None:
    box = outbox(Wire(), kept_max=3)
    for step in range(1, 4):
        assert box.await_room(WAIT_S)
        box.send(held(step))
    assert not box.await_room(0.01), "nobody makes anything durable"
    waiting = threading.Thread(target=box.await_room, args=[WAIT_S])
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    box.acknowledge(1)
    waiting.join(10)
    assert not waiting.is_alive()
    box.send(held(4))
    box.close()
    assert box.await_room(0.0)  # nobody will acknowledge anything


def test_nobody_waits_while_the_next_controller_is_told_the_rest() -> None:
    """An outage's thousands of messages, to one that has just begun: steps waited for all of it."""
    first, last = Wire(most=0), Wire()
    box = outbox(first)
    for step in range(1, 201):
        box.send(held(step))
    last.goes_on.clear()
    telling = threading.Thread(target=box.go_on, args=[last, 10], daemon=True)
    telling.start()
    trains = threading.Thread(target=box.send, args=[held(201)], daemon=True)
    trains.start()
    trains.join(WAIT_S)
    assert not trains.is_alive() and last.sent == []
    last.goes_on.set()
    telling.join(WAIT_S)
    while box._untold():  # that has taken a while: the rest once it is heard
        box.catch_up()
    assert last.numbers() == list(range(11, 202))
    assert box.send(held(202)) and last.numbers()[-1] == 202


def test_who_catches_up_slowly_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that drained within ROOM_S, message by message, was told all of them before
    anything that it said was read: a pause came after that."""
    now_s = 100.0
    monkeypatch.setattr(outboxes, "time", SimpleNamespace(monotonic=lambda: now_s))
    wire = Wire(most=10_000)
    box = outbox(wire)
    wire.room = False
    for step in range(1000):
        box.send(held(step))

    def slowly(timeout_s: float) -> bool:
        nonlocal now_s
        now_s += 0.02
        return True

    wire.has_room = slowly  # type: ignore[method-assign]
    box.catch_up()
    assert 0 < len(wire.sent) <= 1 + outboxes.TELL_S / 0.02 and now_s < 101.0
    while len(wire.sent) < 1000:
        before = len(wire.sent)
        box.catch_up()  # it was heard again
        assert len(wire.sent) > before
    assert wire.numbers() == list(range(1, 1001))


def test_nobody_waits_for_a_controller_that_takes_nothing() -> None:
    """Its buffers are full: steps, or who hears it, waited for seconds, and the line ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    mine = Channel(here, Session(1, SECRET, SECRET), TO_WORKER)
    its = Channel(there, Session(1, SECRET, SECRET), TO_CONTROLLER)
    box, count = LineOutbox(mine), 0

    def train() -> None:
        nonlocal count
        while box.send(held(count + 1)):
            count += 1
        box.send(Heartbeat("w0", 1, 1, 1, "forward"))
        for _ in range(REST - 1):
            assert not box.send(Note("w0", 1, "x", "y" * 5000))

    trains = threading.Thread(target=train, daemon=True)
    trains.start()
    trains.join(2 * WAIT_S)
    assert not trains.is_alive()
    mine.limit(0.1)  # whoever waits for it now ends the line
    box.catch_up()  # it was heard, and still reads nothing
    mine.limit(WAIT_S)

    over, numbers = threading.Event(), list[int]()

    def hear() -> None:
        while box._untold() and not over.is_set():
            box.catch_up()

    telling = threading.Thread(target=hear, daemon=True)
    telling.start()
    try:
        while len(numbers) < count + REST:
            message = its.receive(WAIT_S)
            if isinstance(message, Numbered):  # there may have been room for the heartbeat
                numbers.append(message.number)
    finally:
        over.set()
    telling.join(WAIT_S)
    mine.close()
    its.close()
    assert numbers == list(range(1, count + REST + 1))


@pytest.mark.parametrize("number", [0, -1, True, "1", None])
def test_a_number_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(MessageRefused):
        TO_CONTROLLER.decode(pack(["StepHeld", held(1), number]))


def test_keepers_lives_are_senders_of_their_own() -> None:
    keeper = Member("keeper:n/0", "n/0", "host", 1)
    assert Hello(MEMBER, "a").sender == Hello(MEMBER, "b").sender == "w0"
    assert Hello(keeper, "a").sender != Hello(keeper, "b").sender


def test_an_owner_says_where_it_can_be_called_and_who_is_the_newest(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for run, address in (("a", ""), ("b", "h:1"), ("c", "h:2")):
        owners.take_over(store, job="j", run=run, run_folder="f", address=address, adopts="a")
    number, owner = owners.newest_after(store, 1) or (0, None)
    assert number == 3 and owner is not None
    assert (owner.run, owner.address, owner.adopts) == ("c", "h:2", "a")
    assert owners.newest_after(store, 3) is None


def test_who_adopts_nobody_ends_the_search_and_a_stranger_does_not(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    owners.take_over(store, job="j", run="a", run_folder="f")
    search = Search(lambda _: store, new_key(tls=False), Hello(MEMBER, owner=1), 1.0, remote=False)
    assert search.run(0.1, threading.Event()) is None, "nobody came"
    owners.take_over(store, job="j", run="b", run_folder="f", address="127.0.0.1:1")
    assert search.run(0.1, threading.Event()) is None, "nobody listens there"
    assert "127.0.0.1:1" in search._trouble
    owners.take_over(store, job="j", run="c", run_folder="f")
    assert search.run(60.0, threading.Event()) is None, "at once"


def test_addresses_are_read_as_they_are_written() -> None:
    for address in (("10.0.0.1", 80), ("fe80::1", 443)):
        assert parse_address(format_address(address)) == address


def test_a_journal_is_read_from_its_newest_snapshot_or_an_older_one() -> None:
    kinds = ["Policy", "JobStarted", "Policy", "Snapshot", "TimerFired", "Policy", "Snapshot", "X"]
    lines = [json.dumps({"type": kind}) + "\n" for kind in kinds]
    content = "".join([*lines, '{"torn'])
    found = [json.loads(text.split(b"\n")[0])["type"] for text in beginnings(content.encode())]
    sizes = [text.count(b"\n") for text in beginnings(content.encode())]
    assert (found, sizes) == (["Policy"] * 3, [3, 6, 8])


def test_a_record_is_cut_after_a_step() -> None:
    content = b"".join(json.dumps({"step": step}).encode() + b"\n" for step in range(3, 8))
    assert [line["step"] for line in backwards(content)] == [7, 6, 5, 4, 3]
    assert [line["step"] for line in backwards(up_to(content, 5))] == [5, 4, 3]
    assert up_to(content, 2) == b"" and up_to(content, 9) == content
