"""Keepers that hang, that strangers call, that are replaced: nobody waits for them for long."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ft.core.assignment import Keeper
from elastic_ft.core.commands import ReleaseWorker
from elastic_ft.core.events import KeeperHolds, KeeperReady
from elastic_ft.errors import StateUnreadable
from elastic_ft.keeper.keeper_client import KeeperClient, KeeperDeadlines, KeeperGone, LeftShard
from elastic_ft.keeper.node_keeper import NodeKeeper
from elastic_ft.keeper.protocol import Sealed
from elastic_ft.transport.control import Inspect
from elastic_ft.transport.tls import JobKey
from tests.oneproc.desks import SCHEMA, SHARD, WHOLE, Desk, held, of, write

IMPATIENT = KeeperDeadlines(dial_s=0.2, answer_s=0.2)


@pytest.fixture
def stopped() -> Iterator[Keeper]:
    """As a process that gets SIGSTOP: its kernel takes connections, and nobody serves them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Keeper("n0", ("127.0.0.1", listener.getsockname()[1]))


def test_who_dials_a_stopped_keeper_is_told_in_time(stopped: Keeper) -> None:
    with pytest.raises(KeeperGone, match=r"keeper:n0 can't be reached in 0.2 s"):
        KeeperClient(stopped, JobKey(b"key"), "w0", IMPATIENT)
    with pytest.raises(StateUnreadable, match=r"keeper:n0/w1: .* can't be reached") as caught:
        LeftShard(stopped, JobKey(b"key"), "w1", of(6), SHARD, patience=IMPATIENT)
    assert caught.value.holder == "keeper:n0/w1"


def test_a_keeper_that_can_not_serve_has_not_damaged_anything(desk: Desk, keeper: Keeper) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    write(client, 6)
    client.close()
    desk.next(KeeperHolds)
    left = LeftShard(keeper, desk.server.key, "w0", of(6), SHARD)
    with pytest.raises(StateUnreadable, match="keeper:n0/w0: KeyError"):
        left.read([("no such tensor", WHOLE)])
    assert left.read([("a", WHOLE)])


def test_a_keeper_that_hangs_while_it_is_asked_delays_nobody_for_long(
    desk: Desk, keeper: Keeper, node_keeper: NodeKeeper
) -> None:
    client = KeeperClient(keeper, desk.server.key, "w0")
    write(client, 6)
    client._patience = IMPATIENT
    client._channel.limit(IMPATIENT.dial_s)
    with node_keeper._lock:
        with pytest.raises(KeeperGone, match=r"nothing heard for 0.2 s"):
            client.allocate(100)
        with pytest.raises(StateUnreadable, match="keeper:n0/w0"):
            LeftShard(keeper, desk.server.key, "w0", of(6), SHARD, patience=IMPATIENT)
        told = Sealed("/proc/0/fd/0", held(7), SCHEMA * 100)
        deadline_s = time.monotonic() + 30
        while client._channel.send(told):  # until the socket is full: then it is given up
            assert time.monotonic() < deadline_s, "a full socket takes more and more"
    with pytest.raises(KeeperGone, match="the line to keeper:n0 has ended"):
        client.tell(told)  # at once
    client.close()


def test_who_asks_is_woken_when_the_line_is_closed(
    desk: Desk, keeper: Keeper, node_keeper: NodeKeeper
) -> None:
    """As another keeper is used, or as the generation is broken off."""
    client = KeeperClient(keeper, desk.server.key, "w0", KeeperDeadlines(answer_s=60))
    failed: list[Exception] = []

    def ask() -> None:
        try:
            client.allocate(100)
        except KeeperGone as error:
            failed.append(error)

    with node_keeper._lock:
        asking = threading.Thread(target=ask)
        asking.start()
        client.close()
        asking.join(10)
    assert failed and not asking.is_alive()


def test_who_is_dismissed_ends_and_saves_nothing(
    desk: Desk, node_keeper: NodeKeeper, tmp_path: Path
) -> None:
    """Replaced, it may go on one day: as nobody's keeper."""
    serving = threading.Thread(target=node_keeper.serve)
    serving.start()
    keeper = desk.next(KeeperReady).keeper
    client = KeeperClient(keeper, desk.server.key, "w0")
    write(client, 6)
    desk.server.dismiss(keeper.name, ReleaseWorker(keeper.name, "nothing heard: it was replaced"))
    assert keeper.name not in desk.server.connected()
    serving.join(10)
    assert not serving.is_alive()
    client.close()
    assert list(tmp_path.iterdir()) == []
    assert desk.ended == []


def test_strangers_who_say_nothing_keep_no_worker_from_its_keeper(
    desk: Desk, keeper: Keeper
) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(3):
            strangers.enter_context(socket.create_connection(keeper.address))
        client = KeeperClient(keeper, desk.server.key, "w0")
        path, _ = client.allocate(4096)
        assert path
        client.close()


def test_what_a_keeper_can_not_do_is_its_lines_end(
    desk: Desk, node_keeper: NodeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would have read there any more, and what is here been saved by nobody."""

    def breaks(*_: object) -> None:
        raise OverflowError("what nobody thought of")

    monkeypatch.setattr("elastic_ft.keeper.node_keeper.inspect", breaks)
    serving = threading.Thread(target=node_keeper.serve, daemon=True)
    serving.start()
    desk.next(KeeperReady)
    assert desk.server.send("keeper:n0", Inspect("w0", 1))
    serving.join(10)
    assert not serving.is_alive()
    assert list(tmp_path.iterdir()), "it says that it has saved"
