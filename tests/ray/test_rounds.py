"""The report barrier and the rounds, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from concurrent import futures
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.hosts.ray import worker_actor, worker_group
from elastic_ft.hosts.ray.ray_private import (
    RayTrainWorker,
    SynchronizationBarrierResetError,
    TrainingReport,
    UserCallbackHandler,
    WorkerStatus,
)
from elastic_ft.hosts.ray.reports import AHEAD_MAX, REPORT, Barrier, Rounds
from elastic_ft.hosts.ray.train_calls import SEQUENCES, Meeting, WorkerRefused
from elastic_ft.hosts.ray.worker_actor import ElasticWorker, Polled
from elastic_ft.hosts.ray.worker_group import ElasticWorkerGroup, seats
from elastic_ft.transport.tls import JobKey


class Callback:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, list[Any]]] = []

    def after_report(self, training_report: Any, metrics: list[Any]) -> None:
        checkpoint = training_report.checkpoint
        self.seen.append((checkpoint.path if checkpoint else None, metrics))


def report(metrics: Any, path: str | None = None) -> TrainingReport:
    checkpoint: Any = SimpleNamespace(path=path) if path else None
    return TrainingReport(checkpoint, metrics, False)


@pytest.fixture(autouse=True)
def no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are made here ask no cluster for their GPU, and leave this process's environment
    as it is."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    monkeypatch.setattr(worker_actor, "_own_gpu", lambda worker: {})
    monkeypatch.setattr(worker_actor, "_make_room", lambda values: None)


@pytest.fixture
def callback() -> Callback:
    return Callback()


class World:
    """Two workers, a and b, of ranks 0 and 1; what is committed is set by hand."""

    def __init__(self, callback: Callback) -> None:
        self.committed = 100
        self.generations: dict[int, int] = {}  # of the rounds
        self.rounds = Rounds([callback], 0, lambda: self.committed)  # type: ignore[list-item]

    def open(self, *members: str, generation: int = 1) -> None:
        self.rounds.open(generation, members or ("a", "b"))
        self.generations[self.rounds.opened] = generation

    def add(
        self, worker: str, index: int, metrics: Any, path: str | None = None, step: int = 0
    ) -> None:
        """The report of round ``index``, made after step ``index`` or ``step``."""
        told = reported(worker, index, metrics, path, step)
        told.report_generation = self.generations.get(index, 1)
        self.rounds.take(worker, told)

    def carry(self, worker: str, step: int, metrics: Any, after: int = 0) -> None:
        """A report of generation 1 that was refused after round ``after``."""
        self.rounds.take(worker, carried(worker, step, metrics, after))


def rank(worker: str) -> int:
    return "abc".index(worker)


def reported(
    worker: str, index: int, metrics: Any, path: str | None = None, step: int = 0
) -> Polled:
    return Polled(
        running=True,
        training_report=report(metrics, path),
        report_index=index,
        report_step=step or index,
        report_generation=1,
        report_rank=rank(worker),
    )


def carried(worker: str, step: int, metrics: Any, after: int = 0) -> Polled:
    refused = WorkerRefused(step, metrics, 1, rank(worker), after)
    return Polled(running=True, report_index=after, carried=(refused,))


@dataclass
class Look:
    """What a worker says to the next controller, in generation 1."""

    rounds: int
    undelivered: tuple[Polled, ...] = ()
    delivered: int = 0
    joined: int = 0
    generation: int = 1

    @property
    def passed(self) -> tuple[int, Any]:
        return SEQUENCES + self.rounds, f"of round {self.rounds}"


@pytest.fixture
def world(callback: Callback) -> World:
    return World(callback)


# ------------------------------------------------------------------------------- rounds


def test_a_round_is_handed_on_in_rank_order_once_all_have_reported(
    world: World, callback: Callback
) -> None:
    world.open()
    world.add("b", 1, 2)
    assert callback.seen == []
    world.add("a", 1, 1)
    assert callback.seen == [(None, [1, 2])]
    assert world.rounds.last_metrics == 1


def test_rounds_are_handed_on_in_order(world: World, callback: Callback) -> None:
    world.open()
    world.open()
    for index in (1, 2):
        world.add("a", index, index)
    world.add("b", 2, 2)
    assert callback.seen == []
    world.add("b", 1, 1)
    assert [metrics for _, metrics in callback.seen] == [[1, 1], [2, 2]]


def test_a_lost_worker_is_not_waited_for(world: World, callback: Callback) -> None:
    world.open()
    world.add("b", 1, 2)
    world.rounds.lose("a")
    assert callback.seen == [(None, [2])]


def test_a_worker_lost_in_the_barrier_is_not_waited_for(world: World, callback: Callback) -> None:
    world.rounds.lose("a")
    world.open()
    world.add("b", 1, 2)
    assert callback.seen == [(None, [2])]


def test_what_a_lost_worker_had_reported_counts(world: World, callback: Callback) -> None:
    world.open()
    world.add("a", 1, 1)
    world.rounds.lose("a")
    world.add("b", 1, 2)
    assert callback.seen == [(None, [1, 2])]


def test_a_round_whose_members_are_all_lost_holds_nobody_up(
    world: World, callback: Callback
) -> None:
    world.open()
    world.rounds.lose("a")
    world.rounds.lose("b")
    world.open("c")
    world.add("c", 2, 3)
    assert callback.seen == [(None, [3])]


def test_a_round_waits_until_its_step_is_committed(world: World, callback: Callback) -> None:
    world.committed = 0
    world.open("a")
    world.add("a", 1, "first")
    assert callback.seen == []
    world.committed = 1
    world.rounds.deliver()
    assert callback.seen == [(None, ["first"])]


def test_a_step_that_is_redone_is_delivered_once(world: World, callback: Callback) -> None:
    world.committed = 0
    world.open("a")
    world.add("a", 1, "lost")  # after step 1, which dies with its generation
    world.rounds.formed(2, 0)
    world.open("a", generation=2)
    world.add("a", 2, "redone", step=1)
    assert callback.seen == []
    world.committed = 1
    world.rounds.deliver()
    assert callback.seen == [(None, ["redone"])]


def test_a_step_that_stands_is_delivered_in_the_next_generation(
    world: World, callback: Callback
) -> None:
    world.committed = 0
    world.open("a")
    world.add("a", 1, "stands")
    world.rounds.formed(2, 1)
    world.committed = 1
    world.rounds.deliver()
    assert callback.seen == [(None, ["stands"])]


@pytest.mark.parametrize(
    "paths, lost, expected",
    [
        ({"a": "p", "b": "p", "c": "p"}, "", "p"),  # sharded, whole
        ({"a": "p", "b": "p"}, "c", None),  # sharded: the part of c is missing
        ({"a": "p", "b": None}, "c", "p"),  # one writes for all
        ({"b": None, "c": None}, "a", None),  # the writer is lost
    ],
)
def test_checkpoint_of_a_round(
    world: World, callback: Callback, paths: dict[str, Any], lost: str, expected: str | None
) -> None:
    world.open("a", "b", "c")
    for worker, path in paths.items():
        world.add(worker, 1, {}, path)
    world.rounds.lose(lost)
    assert [path for path, _ in callback.seen] == [expected]


def test_refused_metrics_come_before_the_next_round_in_rank_order(
    world: World, callback: Callback
) -> None:
    for worker in ("b", "a"):
        world.carry(worker, 7, {"from": worker})
    world.open("a", generation=2)
    world.add("a", 1, {"step": 8}, step=8)
    seven = [{"from": "a"}, {"from": "b"}]
    assert [metrics for _, metrics in callback.seen] == [seven, [{"step": 8}]]
    world.rounds.deliver_carried()
    assert len(callback.seen) == 2


def test_refused_metrics_do_not_overtake_a_round(world: World, callback: Callback) -> None:
    world.carry("a", 2, "second")
    world.open("a")
    world.add("a", 1, "first")
    world.rounds.deliver_carried()
    assert [metrics for _, metrics in callback.seen] == [["first"], ["second"]]


def test_refused_metrics_of_a_step_that_is_redone_are_dropped(
    world: World, callback: Callback
) -> None:
    world.carry("a", 7, {"step": 7})
    world.rounds.formed(3, 6)
    world.rounds.deliver_carried()
    assert callback.seen == []


# ------------------------------------------------------------------- the next controller


def test_who_has_not_heard_that_the_last_round_opened_takes_part_in_it(
    world: World, callback: Callback
) -> None:
    """The controller was killed as one had its answer, and the other not yet."""
    world.rounds.resume({"a": Look(5, (reported("a", 5, "a5"),)), "b": Look(4, delivered=4)}, 4)
    world.rounds.deliver()
    assert callback.seen == []
    world.add("b", 5, "b5")
    assert callback.seen == [(None, ["a5", "b5"])]


def test_who_has_heard_of_no_round_of_an_older_generation_is_not_waited_for(
    world: World, callback: Callback
) -> None:
    world.rounds.resume(
        {"a": Look(5, (reported("a", 5, "a5"),)), "c": Look(0, joined=5, generation=2)}, 4
    )
    assert callback.seen == [(None, ["a5"])]


def test_who_came_after_a_round_owes_it_nothing(world: World, callback: Callback) -> None:
    """All are of one generation, and one has not heard of its last collective, no report."""
    a, b = (Look(5, (reported(w, 5, f"{w}5"),), generation=1) for w in "ab")
    world.rounds.resume({"a": a, "b": b, "c": Look(0, joined=5)}, 4)
    assert callback.seen == [(None, ["a5", "b5"])]


def test_a_round_of_which_nothing_was_fetched_is_of_the_generation_that_its_reports_say(
    world: World, callback: Callback
) -> None:
    """A generation has formed since, from the step before: the round is void."""
    world.rounds.formed(2, 4)
    world.rounds.resume({w: Look(5, generation=2) for w in "ab"}, 4)
    world.add("a", 5, "a5")
    world.add("b", 5, "b5")
    assert callback.seen == []


def test_who_asks_again_is_told_though_the_generation_is_over() -> None:
    """Else it would refuse a round that others have joined in: two halves of a report."""

    async def scenario() -> None:
        world = Fenced()
        world.barrier.resume([(SEQUENCES + 1, "of rank 0"), (SEQUENCES, None)])
        world.fenced.add(1)
        assert await world.join(1, 2, 1) == "of rank 0"

    asyncio.run(scenario())


def test_who_did_not_get_the_answer_is_told_again() -> None:
    async def scenario() -> None:
        world = Fenced()
        await asyncio.gather(world.join(0, 2, 1, "name"), world.join(1, 2, 1))
        assert await world.join(1, 2, 1) == "name"
        assert world.opened == [1]

    asyncio.run(scenario())


def test_refused_metrics_are_kept_until_they_are_delivered(
    world: World, callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first controller has fetched them, and dies before the next round."""
    polled = iter([report("a1"), None, None])

    def poll(self: Any) -> WorkerStatus:
        return WorkerStatus(running=True, training_report=next(polled))

    monkeypatch.setattr(RayTrainWorker, "poll_status", poll)
    worker = ElasticWorker()
    first = worker.poll_status()
    worker._carried.append(WorkerRefused(2, {"of": "a"}, 1, rank=0, after=1))
    second = worker.poll_status(first.sequence)
    assert [refused.step for refused in second.carried] == [2]
    worker.poll_status(second.sequence, delivered=1)
    kept = tuple(worker._undelivered)
    world.rounds.resume({"a": Look(1, kept), "b": Look(1, (carried("b", 2, {"of": "b"}, 1),))}, 1)
    world.rounds.deliver_carried()
    assert callback.seen == [(None, [{"of": "a"}, {"of": "b"}])]
    worker.poll_status(second.sequence, delivered=2)
    assert not worker._undelivered


def test_refused_metrics_that_were_delivered_are_not_again(
    world: World, callback: Callback
) -> None:
    """They came with the report of a round, which was the last that was delivered."""
    both = reported("a", 2, "a2")
    both.carried = carried("a", 1, "refused", after=1).carried
    world.rounds.resume({"a": Look(2, (both,))}, 2)
    world.rounds.deliver_carried()
    assert callback.seen == []


# ------------------------------------------------------------------------------ barrier


class Fenced:
    def __init__(self) -> None:
        self.fenced: set[int] = set()
        self.opened: list[int] = []
        self.barrier = Barrier(self.fenced.__contains__, self.opened.append)

    async def join(self, rank: int, size: int, generation: int, data: Any = None) -> Any:
        sequence = generation * SEQUENCES + 1
        return await self.barrier.join(rank, size, data, REPORT, sequence)


def test_all_leave_the_barrier_together_with_the_data_of_rank_0() -> None:
    async def scenario() -> None:
        world = Fenced()
        names = await asyncio.gather(*(world.join(rank, 3, 1, f"of {rank}") for rank in range(3)))
        assert names == ["of 0"] * 3
        assert world.opened == [1]

    asyncio.run(scenario())


def test_a_fenced_generation_is_refused_whole() -> None:
    async def scenario() -> None:
        world = Fenced()
        waiting = [asyncio.ensure_future(world.join(rank, 3, 1)) for rank in range(2)]
        await asyncio.sleep(0.01)
        world.fenced.add(1)
        for outcome in await asyncio.gather(*waiting, world.join(2, 3, 1), return_exceptions=True):
            assert isinstance(outcome, SynchronizationBarrierResetError)
        assert world.opened == []

    asyncio.run(scenario())


def test_a_round_that_has_opened_is_not_torn_by_the_fence() -> None:
    async def scenario() -> None:
        world = Fenced()
        first = asyncio.ensure_future(world.join(0, 2, 1, "name"))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(world.join(1, 2, 1))
        await asyncio.sleep(0)
        world.fenced.add(1)
        assert await asyncio.gather(first, second) == ["name", "name"]

    asyncio.run(scenario())


def test_generations_do_not_meet() -> None:
    async def scenario() -> None:
        world = Fenced()
        old = asyncio.ensure_future(world.join(0, 2, 1, "old"))
        await asyncio.sleep(0.01)
        world.fenced.add(1)
        assert await asyncio.gather(world.join(0, 2, 2, "new"), world.join(1, 2, 2)) == ["new"] * 2
        with pytest.raises(SynchronizationBarrierResetError):
            await old
        assert world.opened == [2]

    asyncio.run(scenario())


# -------------------------------------------------------------------------------- seats


def test_seats_count_ranks_per_node() -> None:
    places = seats(["n1", "n0", "n1", "n2"])
    assert [p.world_rank for p in places] == [0, 1, 2, 3]
    assert [p.local_rank for p in places] == [0, 0, 1, 0]
    assert [p.local_world_size for p in places] == [2, 1, 2, 1]
    assert [p.node_rank for p in places] == [0, 1, 0, 2]


# ------------------------------------------------------------------------------ polling


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
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each poll takes a call of every worker. Whatever may bring news ends the wait for the next.

    Here "seldom" is never.
    """
    monkeypatch.setattr(worker_group, "IDLE_S", 3600.0)
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


class Slow:
    """A user's callback that takes its time."""

    def __init__(self) -> None:
        self.may_end, self.seen = threading.Event(), list[Any]()

    def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
        assert self.may_end.wait(30)
        self.seen.append(metrics)


def test_a_users_callback_that_is_slow_holds_up_no_report() -> None:
    """It ran in Ray Train's loop, in which workers meet to report: each stood in its next report,
    and passed for hung after eight minutes."""
    slow = Slow()
    handler: Any = UserCallbackHandler([slow], None)  # type: ignore[list-item, arg-type]
    world = World(handler)

    def train() -> None:
        for index in (1, 2):
            world.open()
            for worker in ("a", "b"):
                world.add(worker, index, f"{worker}{index}")

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(20)
    assert not training.is_alive(), "it waits for the callback"
    assert (world.rounds.delivered, world.rounds.is_full) == (0, False), "it is told again, if not"
    for _ in range(AHEAD_MAX):
        world.open()
    assert world.rounds.is_full, "as far as training goes ahead"
    slow.may_end.set()
    asyncio.run(world.rounds.finish())
    assert slow.seen == [["a1", "b1"], ["a2", "b2"]] and world.rounds.delivered == 2


def test_reports_of_steps_that_no_snapshot_has_yet_are_fetched_all_the_same(world: World) -> None:
    """With a snapshot every twenty steps nobody came to one: the tenth report was not fetched, and
    the step of the twelfth was never made."""
    world.committed = 0
    for index in range(1, 3 * AHEAD_MAX):
        world.open()
        for worker in ("a", "b"):
            world.add(worker, index, f"{worker}{index}")
        assert not world.rounds.is_full, index
    world.committed = 2 * AHEAD_MAX
    world.rounds.deliver()
    assert world.rounds.delivered == 2 * AHEAD_MAX


def test_the_last_round_is_handed_on_where_the_callback_before_ends_in_between() -> None:
    slow = Slow()
    handler: Any = UserCallbackHandler([slow], None)  # type: ignore[list-item, arg-type]
    world = World(handler)
    for index in (1, 2, 3):
        world.open()
        for worker in ("a", "b"):
            world.add(worker, index, f"{worker}{index}")
    deliver = world.rounds.deliver

    def and_then_it_ends() -> None:
        deliver()
        slow.may_end.set()
        assert not futures.wait(world.rounds._users._calls, 30).not_done

    world.rounds.deliver = and_then_it_ends  # type: ignore[method-assign]
    asyncio.run(world.rounds.finish())
    assert [metrics[0] for metrics in slow.seen] == ["a1", "a2", "a3"]
    assert world.rounds.delivered == 3
