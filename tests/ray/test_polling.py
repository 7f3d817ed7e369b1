"""Workers and who polls them, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.hosts.ray import worker_actor, worker_group
from elastic_ft.hosts.ray.ray_private import RayTrainWorker, WorkerStatus
from elastic_ft.hosts.ray.train_calls import Meeting
from elastic_ft.hosts.ray.worker_actor import ElasticWorker
from elastic_ft.hosts.ray.worker_group import ElasticWorkerGroup
from elastic_ft.transport.tls import JobKey
from tests.ray.round_worlds import Callback, World, report

pytestmark = pytest.mark.usefixtures("no_actor")


def test_an_answer_that_was_lost_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = iter([report("one"), report("two"), None])

    def poll(self: Any) -> WorkerStatus:
        return WorkerStatus(running=True, training_report=next(reports))

    monkeypatch.setattr(RayTrainWorker, "poll_status", poll)
    worker = ElasticWorker()
    first = worker.poll_status(0)
    assert worker.poll_status(0) is first
    second = worker.poll_status(first.sequence)
    assert [p.training_report.metrics for p in (first, second) if p.training_report] == [
        "one",
        "two",
    ]
    assert [p.report_index for p in (first, second)] == [1, 2]
    assert worker.poll_status(second.sequence).training_report is None


def test_what_fails_before_the_train_loop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a worker that nobody missed; imports of two threads at once had met halfway."""
    worker, order = ElasticWorker(), list[str]()
    worker._importing.join()
    worker._importing = threading.Thread(target=lambda: order.append("imported"))

    def loads(loop: bytes) -> None:
        order.append("loaded")
        raise ImportError("partially initialized")

    monkeypatch.setattr(worker_actor.cloudpickle, "loads", loads)
    monkeypatch.setattr(worker, "_tell_end", order.append)
    worker._importing.start()
    task = worker_actor.Task(("", 0), JobKey(b""), "w0", "n0", b"a train loop")
    with pytest.raises(ImportError):
        worker._train(task)
    assert order == ["imported", "loaded", "ImportError: partially initialized"]


@pytest.mark.timeout(20)
def test_an_ended_worker_waits_for_a_controller_that_is_busy() -> None:
    """A callback at the job's end took longer than a worker waits to be asked."""
    worker, looks = ElasticWorker(), iter([True, True, True, False])
    worker.await_nobody(lambda: next(looks), unasked_s=0.05)
    assert list(looks) == []


def test_an_ended_worker_that_is_polled_asks_nobody_who_is_in_charge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, now_s = ElasticWorker(), 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s <= 120.0:
            worker._polled_s = now_s

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(worker_actor, "time", clock)
    worker.await_nobody(lambda: False, unasked_s=60.0)
    assert now_s == 180.0, "60 s after the last one, of 120 s"


def test_workers_are_polled_seldom_unless_a_report_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each poll takes a call of every worker. Whatever may bring news ends the wait for the next.

    Here "seldom" is never.
    """
    monkeypatch.setattr(worker_group, "IDLE_S", 3600.0)
    callback = Callback()
    world = World(callback)
    group: Any = object.__new__(ElasticWorkerGroup)
    group.rounds = world.rounds

    async def rests() -> list[bool]:
        group._news = asyncio.Event()
        resting = asyncio.ensure_future(group.rest(0.0))
        await asyncio.sleep(0.05)
        found = [resting.done()]
        group.wake()
        await resting
        world.open()
        await group.rest(0.0)  # a round is open
        for worker in "ab":
            world.add(worker, 1, worker)
        resting = asyncio.ensure_future(group.rest(0.0))
        await asyncio.sleep(0.05)
        found.append(resting.done())
        resting.cancel()
        return found

    assert asyncio.run(rests()) == [False, False]
    assert callback.seen


def test_a_worker_looks_for_its_controller_before_it_reports() -> None:
    """With an actor's first call Ray asks the GCS where it is, which may be away by then."""
    asked: list[str] = []
    process = SimpleNamespace(remote=lambda: asked.append("process"))
    Meeting(SimpleNamespace(process=process))  # type: ignore[arg-type]
    assert asked == ["process"]
