"""The controller's connections: who is let in, and that none outlives it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from elastic_ft.core.assignment import Member
from elastic_ft.core.commands import ReleaseWorker
from elastic_ft.transport import control
from elastic_ft.transport.control import ControlServer, Hello, Welcome, connect
from elastic_ft.transport.handshake import WrongKey
from elastic_ft.transport.tls import JobKey
from tests.multiproc.harness import make_job

MEMBER = Member("w0", "n0", "localhost", 1)


def welcomed(member: Member) -> Welcome:
    return Welcome(make_job(), "run", "url", ("", 0))


class Server:
    def __init__(self, welcome: Callable[[Member], Welcome] = welcomed) -> None:
        self._welcome = welcome

    def __enter__(self) -> Server:
        self.messages: list[Any] = []
        self.ended = threading.Event()
        self.server = ControlServer(
            "127.0.0.1",
            self._welcome,
            lambda member, message: self.messages.append(message),
            lambda member, silent_s: self.ended.set(),
        )
        self.server.start()
        self.address = ("127.0.0.1", self.server.port)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_one_that_says_nothing_keeps_nobody_out() -> None:
    with Server() as server, socket.create_connection(server.address):
        channel, welcome = connect(server.address, server.server.key, Hello(MEMBER))
        assert welcome.run == "run"
        channel.close()
        assert server.ended.wait(10)


def test_a_stranger_without_the_key_is_refused() -> None:
    with Server() as server:
        with pytest.raises(WrongKey):
            connect(server.address, JobKey(b"not the key"), Hello(MEMBER))
        assert server.server.connected() == ()


def test_closing_ends_every_connection() -> None:
    with Server() as server:
        stranger = socket.create_connection(server.address)
        channel, _ = connect(server.address, server.server.key, Hello(MEMBER))
        server.server.close()
        with pytest.raises(EOFError):
            channel.receive()
        assert stranger.recv(1024) == b""
        stranger.close()
        channel.close()
        channel.close()  # twice is harmless


def test_one_that_has_started_again_is_not_lost_with_its_last_life() -> None:
    """A keeper keeps its name; the end of its last connection may be noticed late."""
    with Server() as server:
        first, _ = connect(server.address, server.server.key, Hello(MEMBER))
        second, _ = connect(server.address, server.server.key, Hello(MEMBER))
        first.close()
        assert not server.ended.wait(0.5)
        assert server.server.connected() == ("w0",)
        second.close()
        assert server.ended.wait(10)


def test_who_has_connected_waits_until_the_controller_has_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It imports torch for that, and may say nothing meanwhile."""

    def slow(member: Member) -> Welcome:
        threading.Event().wait(1.5)
        return welcomed(member)

    monkeypatch.setattr(control, "CONNECT_TIMEOUT_S", 1.0)
    with Server(slow) as server:
        channel, welcome = connect(server.address, server.server.key, Hello(MEMBER))
        assert welcome.run == "run"
        channel.close()


def test_a_welcome_is_the_first_that_anybody_hears() -> None:
    """Who came back to a controller that was importing torch heard a command, took that for no
    controller's, and called again, until it was given up."""
    asked, said = threading.Event(), threading.Event()

    def slow(hello: Hello) -> Welcome:
        asked.set()
        assert said.wait(10)
        return welcomed(hello.member)

    def command() -> None:
        assert asked.wait(10)
        sent.append(server.server.send("w0", ReleaseWorker("w0", "to be told again")))
        assert server.messages == []  # nobody is there before it is welcomed
        said.set()

    sent: list[bool] = []
    with Server(slow) as server:
        thread = threading.Thread(target=command)
        thread.start()
        channel, welcome = connect(server.address, server.server.key, Hello(MEMBER))
        thread.join()
        assert (welcome.run, sent) == ("run", [False])
        until_s = time.monotonic() + 10
        while not server.server.send("w0", ReleaseWorker("w0", "now")):
            assert time.monotonic() < until_s
        assert channel.receive(10) == ReleaseWorker("w0", "now")
        channel.close()
        assert server.ended.wait(10)
        assert server.messages == [Hello(MEMBER)]  # told of it once it can be answered


def test_who_can_not_be_welcomed_is_sent_away() -> None:
    """It stayed connected, and nobody was told of its end."""

    def no_store(member: Member) -> Welcome:
        raise TimeoutError("no store")

    with Server(no_store) as server:
        with pytest.raises(EOFError):
            connect(server.address, server.server.key, Hello(MEMBER))
        assert server.ended.wait(10)
        assert server.server.connected() == ()
