"""A node is not left without a keeper: after the fourth that had ended it was, for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.hosts import keeper_lives
from elastic_ft.hosts.keeper_lives import AGAIN_S, EARLY_S, KeeperLives
from elastic_ft.hosts.local import LocalHost
from elastic_ft.hosts.ray import keeper_actor
from elastic_ft.hosts.ray.keeper_actor import Keepers
from elastic_ft.transport.reception import listen
from elastic_ft.transport.tls import JobKey
from tests.waiting import until

LIVES = 7


def test_keepers_that_end_early_come_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(keeper_lives.time, "monotonic", lambda: now_s)
    lives, pauses = KeeperLives(), []
    for lived_s in (EARLY_S, *[1.0] * len(AGAIN_S), EARLY_S, 1.0):
        lives.begin()
        now_s += lived_s
        pauses.append(lives.end())
    assert pauses == [AGAIN_S[0], *AGAIN_S[1:], AGAIN_S[-1], AGAIN_S[0], AGAIN_S[1]]


def test_a_killed_keeper_is_replaced_however_many_were_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them for long enough not to be early."""
    monkeypatch.setattr(keeper_lives, "EARLY_S", 0.0)
    with listen("127.0.0.1") as silent:
        host = LocalHost({"n0": 1})
        host.start(lambda event: None, silent.getsockname(), JobKey(b"k" * 32))
        try:
            pids = set[int]()
            for _ in range(LIVES):
                pid = until(lambda: next_keeper(host, pids), "the next keeper")
                pids.add(pid)
                os.kill(pid, signal.SIGKILL)
            until(lambda: next_keeper(host, pids), "one more keeper")
        finally:
            host.close()


def next_keeper(host: LocalHost, known: set[int]) -> int:
    """0: there is none yet."""
    try:
        pid = host.keeper_of("n0")
    except ProcessLookupError:
        return 0
    return 0 if pid in known else pid


def test_ray_is_asked_for_a_keeper_until_its_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, started = set[str](), list[str]()
    monkeypatch.setattr(keeper_lives, "EARLY_S", 0.0)
    monkeypatch.setattr(keeper_actor, "RESTART_S", 0.0)

    async def ends_at_once(actor: Any) -> None:
        if len(started) == LIVES:
            lost.add("n0")

    def start(names: Any, address: Any, key: Any, node: str, executable: str) -> Any:
        started.append(node)
        return SimpleNamespace()

    monkeypatch.setattr(keeper_actor, "_await_end", ends_at_once)
    monkeypatch.setattr(keeper_actor, "start_keeper", start)

    async def keep() -> None:
        keepers = Keepers(SimpleNamespace(), lost)  # type: ignore[arg-type]
        keepers.keep("n0")
        await keepers.await_end(10.0)

    asyncio.run(keep())
    assert started == ["n0"] * LIVES


def test_an_end_does_not_wait_for_a_keeper_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others have minutes to save what they have; who is in a pause has nothing."""
    ended = asyncio.Event()
    monkeypatch.setattr(keeper_lives, "AGAIN_S", (300.0,))

    async def ends_at_once(actor: Any) -> None:
        ended.set()

    monkeypatch.setattr(keeper_actor, "_await_end", ends_at_once)
    monkeypatch.setattr(keeper_actor, "start_keeper", lambda *args: SimpleNamespace())

    async def close_in_a_pause() -> None:
        keepers = Keepers(SimpleNamespace(), set())  # type: ignore[arg-type]
        keepers.keep("n0")
        await ended.wait()
        keepers.close()
        async with asyncio.timeout(20.0):
            await keepers.await_end(60.0)

    asyncio.run(close_in_a_pause())
