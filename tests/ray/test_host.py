"""What the host does by itself, without a cluster."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.hosts.ray import ray_host as hosts
from elastic_ft.hosts.ray.causes import KILLED
from elastic_ft.hosts.ray.hosted import Hosted
from elastic_ft.hosts.ray.keeper_actor import KeeperLife
from elastic_ft.hosts.ray.names import RunNames
from elastic_ft.hosts.ray.ray_host import RayHost

DEADLINE_S = 20.0
START_TIMEOUT_S = 0.2


@pytest.fixture
def host() -> Iterator[RayHost]:
    """Its loop runs; it hosts nobody."""
    placements = SimpleNamespace(clear=lambda: None, give_back=lambda group, keep: None)
    names = RunNames("job", "/run")
    launch: Any = SimpleNamespace(
        placements=placements,
        names=names,
        executable="",
        start_timeout_s=START_TIMEOUT_S,
        on_lost=lambda worker: None,
    )
    made = RayHost(SimpleNamespace(members=()), launch)  # type: ignore[arg-type]
    made._thread.start()
    yield made
    made._loop.call_soon_threadsafe(made._loop.stop)
    made._thread.join(DEADLINE_S)


def on_loop(host: RayHost, function: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return function()

    return asyncio.run_coroutine_threadsafe(run(), host._loop).result(DEADLINE_S)


def test_a_node_that_is_avoided_again_is_avoided_for_longer(host: RayHost) -> None:
    placed: list[float] = []
    host._placements.clear = lambda: placed.append(0.0)  # type: ignore[method-assign]
    on_loop(host, lambda: [host._avoid("n1", for_s) for for_s in (0.2, 1000.0)])  # in one turn
    host.avoid_node("n2", 0.4)  # due after the first one's end
    until_s = time.monotonic() + DEADLINE_S
    while on_loop(host, lambda: "n2" in host._nodes.avoided):
        assert time.monotonic() < until_s
    assert on_loop(host, lambda: list(host._nodes.avoided)) == ["n1"]
    assert len(placed) == 3  # n1, n2, and n2 no more: what waits for a place is asked for anew


@pytest.mark.parametrize("saves", [True, False], ids=["in-time", "for-ever"])
def test_keepers_that_save_are_not_killed_before_their_time(
    host: RayHost, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """Ray Train's controller has waited long enough for ours, which waits for its keepers."""
    events: list[str] = []
    monkeypatch.setattr(hosts.ray, "kill", events.append)
    saved = on_loop(host, asyncio.Event)

    async def keep() -> None:
        await saved.wait()
        events.append("saved")

    def begin() -> None:
        host._keepers._lives["n1"] = KeeperLife("killed")  # type: ignore[arg-type]
        host._keepers._tasks["n1"] = host._loop.create_task(keep())

    on_loop(host, begin)
    closing = threading.Thread(target=host.close, args=(DEADLINE_S if saves else 0.3,))
    closing.start()
    until_s = time.monotonic() + DEADLINE_S
    while not host._closed:
        assert time.monotonic() < until_s
    releasing = threading.Thread(target=host.release)
    releasing.start()
    for _ in range(20 if saves else 0):  # the loop has had its turns
        on_loop(host, lambda: None)
    assert not saves or events == []
    if saves:
        on_loop(host, saved.set)
    closing.join(DEADLINE_S)
    releasing.join(DEADLINE_S)
    assert events == (["saved", "killed"] if saves else ["killed"])


class Actor:
    """Of a worker: what it is asked is answered once it has called, or never."""

    def __init__(self, calls: bool) -> None:
        self.await_called = SimpleNamespace(remote=self._called if calls else _never)
        self.await_end = SimpleNamespace(remote=_never)

    async def _called(self) -> None:
        pass


async def _never() -> None:
    await asyncio.Event().wait()


def test_a_worker_that_never_calls_is_lost(host: RayHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports hang, say: it was counted as one of the wanted, and waited for without end."""
    killed: list[Any] = []
    monkeypatch.setattr(hosts.ray, "kill", killed.append)
    told: SimpleQueue[Any] = SimpleQueue()
    host._inbox = told.put
    calls, hangs = Actor(calls=True), Actor(calls=False)

    def begin() -> None:
        host._begun.set()
        for worker, actor in ("w0", calls), ("w1", hangs):
            hosted: Any = Hosted(worker, actor=actor, handle=actor)  # type: ignore[arg-type]
            host._hosted[worker] = hosted
            hosted.task = host._loop.create_task(host._host(hosted))

    on_loop(host, begin)
    lost = told.get(timeout=DEADLINE_S)
    assert lost.worker == "w1"
    assert lost.cause == "TimeoutError: it did not call the controller in 0.2 s"
    assert on_loop(host, lambda: list(host._hosted)) == ["w0"] and killed == [hangs]
    on_loop(host, lambda: [hosted.task.cancel() for hosted in host._hosted.values()])


def test_the_controllers_own_kill_explains_no_loss(host: RayHost) -> None:
    """A worker whose node died is killed, to be sure: the journal had that as what ended it."""
    told: list[Any] = []
    host._inbox = told.append

    def lose() -> None:
        for worker, cause in (("w0", KILLED), ("w1", "its node died")):
            host._hosted[worker] = hosted = Hosted(worker)
            host._lost(hosted, cause)

    on_loop(host, lose)
    assert [(lost.worker, lost.asked) for lost in told] == [("w0", True), ("w1", False)]
