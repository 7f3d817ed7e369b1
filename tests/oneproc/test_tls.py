"""TLS around our own connections: who is let in, and that nobody can read along."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli import preflight
from elastic_ft.cli.where import Where
from elastic_ft.errors import ConfigError
from elastic_ft.transport import reception, tls, wire
from elastic_ft.transport.handshake import HELLO, MAGIC, OLDEST, VERSION
from elastic_ft.transport.messages import Messages
from elastic_ft.transport.reception import STRANGERS_MAX, Reception
from elastic_ft.transport.tls import JobKey, WrongCertificate, new_key
from elastic_ft.transport.wire import Channel
from tests.multiproc.harness import make_job

SOON_S = 30.0
MARK = b"weights of a model" * 10
SILENT = 200


@dataclass(frozen=True, slots=True)
class Ping:
    number: int
    payload: bytes = b""


PINGS = Messages(Ping)


@pytest.fixture(scope="module")
def key() -> JobKey:
    return new_key(tls=True)


class Desk:
    """Answers each message with the same."""

    def __init__(self, key: JobKey) -> None:
        self.heard: list[Ping] = []
        self.reception = Reception("desk", "127.0.0.1", key, PINGS, self._serve)
        self.reception.start()
        self.address = ("127.0.0.1", self.reception.port)

    def _serve(self, channel: Channel) -> None:
        try:
            while True:
                self.heard.append(channel.receive())
                channel.send(self.heard[-1])
        except EOFError:
            return


@pytest.fixture
def desk(key: JobKey) -> Iterator[Desk]:
    made = Desk(key)
    yield made
    made.reception.close()


def test_messages_arrive_in_order_small_and_large(desk: Desk, key: JobKey) -> None:
    channel = wire.dial(desk.address, key, PINGS)
    sent = [Ping(n, bytes(size)) for n, size in enumerate((0, 1, 16_384, 70_000, 3 << 20, 5))]
    for message in sent:
        assert channel.send(message)
        assert channel.receive(SOON_S) == message
    channel.close()
    assert desk.heard == sent


def test_one_thread_sends_while_another_receives(desk: Desk, key: JobKey) -> None:
    """Both directions full at once: ``ssl.SSLSocket`` breaks, or stands still, with two threads."""
    channel = wire.dial(desk.address, key, PINGS)
    sent = [Ping(n, bytes(n % 7 * 30_000)) for n in range(400)]
    sender = threading.Thread(target=lambda: [channel.send(message) for message in sent])
    sender.start()
    assert [channel.receive(SOON_S) for _ in sent] == sent
    sender.join(SOON_S)
    channel.close()


def test_a_message_is_waited_for_no_longer_than_told(desk: Desk, key: JobKey) -> None:
    channel = wire.dial(desk.address, key, PINGS)
    with pytest.raises(EOFError, match="nothing heard for"):
        channel.receive(0.05)
    channel.close()


def test_half_a_record_is_waited_for_no_longer_than_told(desk: Desk, key: JobKey) -> None:
    """Something has come, and nothing can be read of it."""

    def cut(data: bytes) -> bytes:
        return data[:-1] if len(data) > 1000 else data  # the answer's, and nothing before

    relay = Relay(desk.address, to_caller=cut)
    channel = wire.dial(relay.address, key, PINGS)
    channel.send(Ping(1, bytes(2000)))
    with pytest.raises(EOFError, match="nothing heard for"):
        channel.receive(0.3)
    channel.close()
    relay.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_who_listens_on_the_network_reads_nothing(key: JobKey, encrypted: bool) -> None:
    used = key if encrypted else JobKey(key.secret)
    desk = Desk(used)
    relay = Relay(desk.address)
    channel = wire.dial(relay.address, used, PINGS)
    channel.send(Ping(1, MARK))
    assert channel.receive(SOON_S) == Ping(1, MARK)
    channel.close()
    relay.close()
    desk.reception.close()
    assert (MARK in b"".join(relay.seen)) == (not encrypted)


def test_a_wrong_certificate_is_refused_by_name(desk: Desk, key: JobKey) -> None:
    other = new_key(tls=True)
    theirs = JobKey(key.secret, other.certificate, other.private_key)
    with pytest.raises(WrongCertificate, match=r"shows the certificate SHA-256 .*, this job's is"):
        wire.dial(desk.address, theirs, PINGS)
    assert desk.heard == []


def test_who_has_the_certificate_and_not_the_key_is_refused(desk: Desk, key: JobKey) -> None:
    with pytest.raises(reception.WrongKey, match="does not have this job's key"):
        wire.dial(desk.address, JobKey(b"x" * 32, key.certificate), PINGS)
    assert desk.heard == []


def test_a_plain_client_is_refused_at_once(desk: Desk, key: JobKey) -> None:
    with socket.create_connection(desk.address) as sock:
        sock.settimeout(SOON_S)
        sock.sendall(HELLO.pack(MAGIC, VERSION, OLDEST, bytes(32)))
        assert HELLO.size > len(sock.recv(4096)), "an alert at most, no answer to a hello"
    began = time.monotonic()
    with pytest.raises((OSError, EOFError)):
        wire.dial(desk.address, JobKey(key.secret), PINGS, timeout_s=1.0)
    assert time.monotonic() - began < SOON_S
    assert desk.heard == []


def test_a_server_without_tls_is_not_spoken_to(key: JobKey) -> None:
    plain = Desk(JobKey(key.secret))
    with pytest.raises((OSError, EOFError)):
        wire.dial(plain.address, key, PINGS, timeout_s=1.0)
    assert plain.heard == []
    plain.reception.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["silent", "half"])
def test_two_hundred_who_are_silent_keep_nobody_out(
    desk: Desk, key: JobKey, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """The second kind has begun with TLS."""
    monkeypatch.setattr(reception, "HANDSHAKE_S", 2.0)
    strangers = []
    for number in range(SILENT):
        strangers.append(socket.create_connection(desk.address, SOON_S))
        strangers[-1].sendall(said)
        if number % 100 == 99:
            channel = wire.dial(desk.address, key, PINGS, SOON_S)
            channel.send(Ping(number))
            assert channel.receive(SOON_S) == Ping(number)
            channel.close()
    assert len(desk.reception._strangers) <= STRANGERS_MAX + 1
    strangers[-1].settimeout(SOON_S)
    assert strangers[-1].recv(1) == b"", "the newest are dropped in time"
    for sock in strangers:
        sock.close()


HALF = b"\x17\x03\x03\x40\x00"  # the head of a record; its 16 KiB follow, byte by byte


def drip(handle: int, until: Callable[[], bool]) -> bool:
    """Whether ``until`` came true, or the other end went away, while one was still at it."""
    deadline_s, pause, data = time.monotonic() + SOON_S / 2, threading.Event(), HALF
    while time.monotonic() < deadline_s:
        if until():
            return True
        try:
            os.write(handle, data)
        except OSError:
            return True
        data = b"x"
        pause.wait(0.05)
    return False


def test_who_finishes_tls_and_then_dawdles_is_dropped_in_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may come so far: a thread of the desk's waits for its hello."""
    monkeypatch.setattr(reception, "HANDSHAKE_S", 2.0)  # for TLS itself, too
    sock = socket.create_connection(desk.address, SOON_S)
    with tls._client_context().wrap_socket(sock) as stranger:
        assert drip(stranger.fileno(), until=lambda: False), "it is still waited for"


@pytest.mark.parametrize("how", ["recv", "readable"])
def test_a_record_that_comes_byte_by_byte_is_waited_for_no_longer_than_told(
    key: JobKey, how: str
) -> None:
    made: list[tls.AnySocket] = []
    deadline_s, context = time.monotonic() + SOON_S, tls.server_context(key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), SOON_S)
        theirs, _ = listener.accept()
    called = threading.Thread(target=lambda: made.append(tls.answer(theirs, context, deadline_s)))
    called.start()
    line = tls.call(ours, key, deadline_s)
    called.join(SOON_S)
    said: list[Any] = []

    def wait() -> None:
        line.settimeout(0.3)
        try:
            said.append(line.recv(1) if how == "recv" else tls.readable(line, 0.3))
        except OSError as error:
            said.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert drip(theirs.fileno(), until=lambda: bool(said)), "it still waits"
    theirs.close()
    waiting.join(SOON_S)
    ours.close()
    assert said == [TimeoutError if how == "recv" else False]


def test_who_asks_for_new_keys_without_end_fills_no_memory(
    key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time TLS has a reply for it, which waits for something to be sent."""
    monkeypatch.setattr(tls, "REPLIES_MAX", 4096, raising=False)
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # it reads one command at a time
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    stranger = subprocess.Popen(
        [tls.find_openssl(), "s_client", "-connect", address],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    accepted, _ = listener.accept()
    line = tls.answer(accepted, tls.server_context(key), time.monotonic() + SOON_S)
    asking = threading.Thread(target=ask_for_keys, args=(ours,), daemon=True)
    asking.start()
    line.settimeout(SOON_S / 2)
    try:
        with pytest.raises(ConnectionError, match="new keys"):
            line.recv(1)
    finally:
        stranger.kill()
        stranger.wait()
        for sock in (ours, accepted, listener):
            sock.close()
        asking.join(SOON_S)


def ask_for_keys(commands: socket.socket) -> None:
    """As many times as the other end of ``commands`` is there to be told: ``K`` and a reply."""
    with contextlib.suppress(OSError):
        for _ in range(5000):
            commands.send(b"K\n")


# ------------------------------------------------------------------------------ the key


def test_a_job_without_tls_makes_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert new_key(tls=False).certificate == b""


def test_the_key_is_not_shown(key: JobKey) -> None:
    assert repr(key) == "JobKey()"


@pytest.mark.parametrize("what", ["preflight", "controller"])
def test_without_openssl_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = make_job(network={"tls": True})
    with pytest.raises(ConfigError, match=r"network\.tls: needs the program openssl") as refused:
        if what == "controller":
            new_key(tls=job.network.tls)
        else:
            preflight.check_job(job, str(tmp_path / "run"), Where(nodes=4, processes=True))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo an odd build >&2; exit 1", "an odd build"),
        ("exit 0", "no certificate"),
        ("sleep 60", "timed out"),
    ],
)
def test_an_openssl_that_makes_none_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, why: str
) -> None:
    program = tmp_path / "openssl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(tls.shutil, "which", lambda name: str(program))
    if why == "timed out":
        monkeypatch.setattr(tls, "OPENSSL_S", 0.5)
    with pytest.raises(ConfigError, match=f"network.tls: .*{why}") as refused:
        new_key(tls=True)
    assert "\n" not in str(refused.value)


# ------------------------------------------------------------------------------- between


class Relay:
    """Sits between two ends, and keeps what it sees.

    ``to_caller``: is given each part that goes to the end that called.
    """

    def __init__(
        self, to: wire.Address, to_caller: Callable[[bytes], bytes] = lambda data: data
    ) -> None:
        self.seen: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self.address: Any = self._listener.getsockname()
        threading.Thread(target=self._run, args=(to, to_caller), daemon=True).start()

    def _run(self, to: wire.Address, to_caller: Callable[[bytes], bytes]) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(to)
        self._open += [near, far]
        threading.Thread(target=self._pump, args=(far, near, to_caller), daemon=True).start()
        self._pump(near, far, lambda data: data)

    def _pump(
        self, one: socket.socket, other: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := one.recv(1 << 16):
                self.seen.append(data)
                other.sendall(change(data))
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for sock in self._open:
            sock.close()
