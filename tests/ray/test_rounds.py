"""The rounds of reports, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from concurrent import futures
from typing import Any

import pytest

from elastic_ft.hosts.ray.ray_private import RayTrainWorker, UserCallbackHandler, WorkerStatus
from elastic_ft.hosts.ray.reports import AHEAD_MAX
from elastic_ft.hosts.ray.train_calls import WorkerRefused
from elastic_ft.hosts.ray.worker_actor import ElasticWorker
from elastic_ft.hosts.ray.worker_group import seats
from tests.ray.round_worlds import Callback, Look, World, carried, report, reported

pytestmark = pytest.mark.usefixtures("no_actor")


@pytest.fixture
def callback() -> Callback:
    return Callback()


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


# -------------------------------------------------------------------------------- seats


def test_seats_count_ranks_per_node() -> None:
    places = seats(["n1", "n0", "n1", "n2"])
    assert [p.world_rank for p in places] == [0, 1, 2, 3]
    assert [p.local_rank for p in places] == [0, 0, 1, 0]
    assert [p.local_world_size for p in places] == [2, 1, 2, 1]
    assert [p.node_rank for p in places] == [0, 1, 0, 2]


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
