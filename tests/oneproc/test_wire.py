"""Connections between processes: who is let in, who is not, and that nothing else happens."""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ft.config import parse_job
from elastic_ft.errors import ConfigError
from elastic_ft.groups.store_links import serve_store
from elastic_ft.observe.metrics import Metrics
from elastic_ft.transport import handshake, reception, wire
from elastic_ft.transport.handshake import (
    HELLO,
    MAGIC,
    OLDEST,
    PROOF_BYTES,
    VERSION,
    Session,
    WrongKey,
    WrongVersion,
)
from elastic_ft.transport.messages import (
    MessageRefused,
    Messages,
    encode,
)
from elastic_ft.transport.reception import STRANGERS_MAX, Reception, listen
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Channel
from tests.multiproc.harness import make_job

SECRET = b"k" * 32
KEY = JobKey(SECRET)
SOON_S = 60.0


@dataclass(frozen=True, slots=True)
class Ping:
    number: int
    payload: bytes = b""
    extra: dict[str, Any] = field(default_factory=dict)


PINGS = Messages(Ping)


class Desk:
    """A reception that keeps what it is sent, and answers each message with the same."""

    def __init__(self, key: JobKey = KEY) -> None:
        self.heard: list[Any] = []
        self.ended: list[str] = []
        self.changed = threading.Condition()
        self.reception = Reception("desk", "127.0.0.1", key, PINGS, self._serve)
        self.reception.start()
        self.address = ("127.0.0.1", self.reception.port)

    def _serve(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                with self.changed:
                    self.heard.append(message)
                    self.changed.notify_all()
                channel.send(message)
        except EOFError as error:
            with self.changed:
                self.ended.append(f"{type(error).__name__}: {error}")
                self.changed.notify_all()

    def wait(self, predicate: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, SOON_S)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.reception.close()


class Relay:
    """Sits between two ends: ``change`` is given each frame that goes to the server."""

    def __init__(self, to: wire.Address, change: Callable[[int, bytes], list[bytes]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._to, self._change = to, change
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        with near, socket.create_connection(self._to) as far:
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            with contextlib.suppress(OSError, EOFError):
                far.sendall(_take(near, HELLO.size))
                far.sendall(_take(near, PROOF_BYTES))
                number = 0
                while True:
                    head = _take(near, 4)
                    frame = head + _take(near, struct.unpack("!I", head)[0] + wire.SEAL_BYTES)
                    for changed in self._change(number, frame):
                        far.sendall(changed)
                    number += 1
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_WR)
            back.join(SOON_S)

    def close(self) -> None:
        self._listener.close()


def _take(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (part := sock.recv(size - len(found))):
            raise EOFError
        found += part
    return found


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


# ------------------------------------------------------------------------- between two ends


def test_messages_arrive_in_order_small_and_large(desk: Desk) -> None:
    channel = wire.dial(desk.address, KEY, PINGS)
    sent = [Ping(number, bytes(size)) for number, size in enumerate((0, 1, 70_000, 3 << 20, 5))]
    for message in sent:
        assert channel.send(message)
        assert channel.receive(SOON_S) == message
    channel.close()
    assert desk.heard == sent


def test_a_wrong_key_is_named_and_lets_nobody_in(desk: Desk) -> None:
    with pytest.raises(WrongKey, match="does not have this job's key"):
        wire.dial(desk.address, JobKey(b"x" * 32), PINGS)
    assert desk.heard == []


def test_who_calls_without_proving_the_key_is_not_admitted(desk: Desk) -> None:
    with socket.create_connection(desk.address) as sock:
        sock.settimeout(SOON_S)
        sock.sendall(HELLO.pack(MAGIC, VERSION, OLDEST, bytes(32)))
        _take(sock, HELLO.size + PROOF_BYTES)
        sock.sendall(bytes(PROOF_BYTES))
        assert sock.recv(1) == b""


def test_versions_that_have_none_in_common_are_refused_by_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = server.accept()
        with sock:
            hello = _take(sock, HELLO.size)
            theirs = HELLO.pack(MAGIC, 9, 8, bytes(32))
            sock.sendall(theirs + hmac.digest(SECRET, b"called\0" + hello + theirs, "sha256"))

    threading.Thread(target=answer, daemon=True).start()
    with server, pytest.raises(WrongVersion, match="speaks versions 8 to 9 of the messages"):
        wire.dial(server.getsockname(), KEY, PINGS)


def test_the_older_of_two_versions_is_spoken() -> None:
    newer = HELLO.pack(MAGIC, VERSION + 1, OLDEST, bytes(32))
    assert handshake._common_version(newer, "x") == VERSION


def tampered(number: int, frame: bytes) -> list[bytes]:
    return [frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]] if number == 1 else [frame]


def replayed(number: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if number == 1 else [frame]


def injected(number: int, frame: bytes) -> list[bytes]:
    body = encode(Ping(666))
    return [frame, struct.pack("!I", len(body)) + body + bytes(16)] if number == 1 else [frame]


def left_out(number: int, frame: bytes) -> list[bytes]:
    return [] if number == 1 else [frame]


def oversized(number: int, frame: bytes) -> list[bytes]:
    return [struct.pack("!I", 0xFFFFFFF0)] if number == 1 else [frame]


@pytest.mark.parametrize("change", [tampered, replayed, injected, left_out, oversized])
def test_who_sits_between_can_only_end_the_connection(
    desk: Desk, change: Callable[[int, bytes], list[bytes]]
) -> None:
    relay = Relay(desk.address, change)
    channel = wire.dial(relay.address, KEY, PINGS)
    for number in range(3):
        channel.send(Ping(number))
    desk.wait(lambda: desk.ended)
    assert desk.heard in ([Ping(0)], [Ping(0), Ping(1)])
    assert "MessageRefused" in desk.ended[0]
    channel.close()
    relay.close()


def test_a_message_cut_short_is_an_end(desk: Desk) -> None:
    relay = Relay(desk.address, lambda number, frame: [frame[:9]] if number == 1 else [frame])
    channel = wire.dial(relay.address, KEY, PINGS)
    channel.send(Ping(0))
    channel.send(Ping(1))
    channel.close()
    desk.wait(lambda: desk.ended)
    assert desk.heard == [Ping(0)]
    relay.close()


def test_what_was_sealed_for_one_end_is_not_read_by_the_other(desk: Desk) -> None:
    """A relay could hand a frame back to who sent it."""
    session = Session(1, b"a" * 32, b"b" * 32)
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    sender, echo = Channel(one, session, PINGS), Channel(other, session, PINGS)
    sender.send(Ping(1))
    with pytest.raises(MessageRefused, match="seal"):
        echo.receive(SOON_S)
    sender.close()
    echo.close()


def test_a_message_is_waited_for_no_longer_than_told(desk: Desk) -> None:
    channel = wire.dial(desk.address, KEY, PINGS)
    with pytest.raises(EOFError, match="nothing heard for"):
        channel.receive(0.05)
    channel.close()


def test_what_has_come_is_not_heard_after_an_end_was_closed() -> None:
    """Who is hung up on, or replaced, has said its last word, though more of it has been read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    sender = Channel(one, Session(1, SECRET, SECRET), PINGS)
    receiver = Channel(other, Session(1, SECRET, SECRET), PINGS)
    for number in range(3):
        sender.send(Ping(number))
    assert receiver.receive(SOON_S) == Ping(0)
    assert receiver._come, "the others were read with it"
    receiver.close()
    with pytest.raises(EOFError, match="closed"):
        receiver.receive(SOON_S)
    sender.close()


def test_sending_to_who_takes_nothing_ends(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        stopped, _ = server.accept()
    channel = Channel(one, Session(1, SECRET, SECRET), PINGS)
    channel.limit(0.2)
    began = time.monotonic()
    assert not channel.send(Ping(0, bytes(32 << 20)))
    assert time.monotonic() - began < SOON_S
    with pytest.raises(EOFError):
        channel.receive(SOON_S)
    stopped.close()
    channel.close()


# ------------------------------------------------------------------------------- strangers


def test_a_thousand_who_say_nothing_keep_nobody_out_and_are_dropped(desk: Desk) -> None:
    strangers = []
    for number in range(1000):
        strangers.append(socket.create_connection(desk.address, SOON_S))
        if number % 250 == 249:
            channel = wire.dial(desk.address, KEY, PINGS)
            channel.send(Ping(number))
            assert channel.receive(SOON_S) == Ping(number)
            channel.close()
    strangers[0].settimeout(SOON_S)
    assert strangers[0].recv(1) == b"", "the oldest are dropped for the next"
    desk.wait(lambda: len(desk.reception._strangers) <= STRANGERS_MAX)
    for sock in strangers:
        sock.close()


def test_who_is_dropped_for_others_calls_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real, dropped = handshake.admit, []

    def admit(sock: socket.socket, key: bytes, deadline_s: float) -> Session:
        if len(dropped) < 4:
            dropped.append(sock)
            raise EOFError("dropped")
        return real(sock, key, deadline_s)

    monkeypatch.setattr(reception, "admit", admit)
    wire.dial(desk.address, KEY, PINGS).close()
    assert len(dropped) == 4


def test_who_says_nothing_is_dropped_in_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_S", 0.2)
    with socket.create_connection(desk.address) as sock:
        sock.settimeout(SOON_S)
        assert sock.recv(1) == b""


@given(data=st.binary(min_size=1, max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_bytes_are_nobody(desk: Desk, data: bytes) -> None:
    with contextlib.suppress(ConnectionError), socket.create_connection(desk.address) as sock:
        sock.settimeout(SOON_S)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    assert desk.heard == []


def test_without_descriptors_it_waits_and_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full table of descriptors costs no core, and strangers make room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    taken: list[int] = []
    sock, full = socket.socket(), threading.Event()
    drop = desk.reception._drop_strangers

    def dropped(left: int) -> None:
        if left == 0:
            full.set()
        drop(left)

    monkeypatch.setattr(desk.reception, "_drop_strangers", dropped)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))

    def fill() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))

    try:
        fill()
        sock.connect(desk.address)  # it waits to be accepted
        deadline = time.monotonic() + SOON_S
        while not full.wait(0.01):
            assert time.monotonic() < deadline
            fill()  # what an earlier test had may have been closed meanwhile
            os.close(taken.pop())
            with contextlib.suppress(OSError), socket.socket() as another:
                another.connect(desk.address)
        before, began = time.process_time(), time.monotonic()
        threading.Event().wait(0.5)  # long enough to tell a spin from a pause
        spent = (time.process_time() - before) / (time.monotonic() - began)
        assert spent < 0.5, f"{spent:.0%} of a core"
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.close()
    channel = wire.dial(desk.address, KEY, PINGS)
    channel.send(Ping(1))
    assert channel.receive(SOON_S) == Ping(1)
    channel.close()


# ---------------------------------------------------------------------------------- ports


def test_all_that_we_listen_at_is_in_the_range() -> None:
    with listen("127.0.0.1") as probe:
        first = probe.getsockname()[1]
    ports = range(first, first + 10)
    with listen("127.0.0.1", ports) as one, listen("127.0.0.1", ports) as other:
        taken = {one.getsockname()[1], other.getsockname()[1]}
        store = serve_store("127.0.0.1", listen("127.0.0.1", ports))
        metrics = Metrics("job")
        taken |= {store.port, metrics.serve("127.0.0.1", ports)}
        metrics.close()
        assert len(taken) == 4 and taken <= set(ports)


def test_a_range_with_no_free_port_is_named() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"network.ports: none of {port}-{port} is free"):
            listen("127.0.0.1", range(port, port + 1))


@pytest.mark.parametrize("ports", ["20100-20000", "80-90", "60000-70000", "20000", "a-b", "1-2-3"])
def test_a_range_that_is_none_is_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match="ports"):
        parse_job({**make_job().model_dump(), "network": {"ports": ports}})
