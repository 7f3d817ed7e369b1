"""Who makes the next world: multiples, spares, what was asked for, the planner, stragglers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.assignment import Tier
from elastic_ft.core.commands import (
    Bench,
    KillWorker,
    PauseWorkers,
    ReleaseWorker,
    StartTimer,
    WantWorkers,
)
from elastic_ft.core.events import (
    CollectiveFailed,
    NodeDraining,
    ResizeRequested,
    WorkerLost,
)
from elastic_ft.core.layouts.layout import Layout
from tests.core.script import assignment_in
from tests.core.worlds import FOUR, lose, of, pause_all, script_of

# --------------------------------------------------------------------------- multiples


def test_a_worker_too_many_stays_warm_and_comes_in_when_it_fits() -> None:
    script = script_of(2, 4, multiple_of=2).run(**FOUR)
    script.train(1)
    commands = lose(script, "d", 1)
    assert script.ranks == ("a", "b")
    assert of(Bench, commands) == [Bench("c", 2, 1)]
    assert of(ReleaseWorker, commands) == []
    script.resume()
    (_, reason) = [line for line in script.journal if line[0] == "generation_formed"][-1]
    assert "idle: c (worlds are multiples of 2)" in reason
    script.train(2)
    assert PauseWorkers(3, ("a", "b", "c"), False, "c, e join") in script.ready("e", "n5")
    pause_all(script, 2)
    assert script.ranks == ("a", "b", "c", "e")


def test_what_a_benched_worker_holds_still_counts() -> None:
    """Both members of the small world die: the one left over has all that there is."""
    script = script_of(2, 4, multiple_of=2).run(**FOUR)
    script.train(1)
    lose(script, "d", 1)
    script.resume()
    held = Layout(dp_replicate=4)
    assert held.shard_space == script.assignment.layout.shard_space
    script.tell(WorkerLost, "a", "killed")
    script.tell(WorkerLost, "b", "killed")
    assert script.state.phase == "pausing"
    script.paused("c", script.copies("a", 1)[0])
    assert script.state.phase == "suspended"
    commands = script.ready("e", "n5")
    assert assignment_in(commands).source.step == 1
    assert assignment_in(commands).source.holders == {"pp0.s0.tp0": (("c", Tier.HOST),)}


def test_steps_that_others_trained_again_are_not_believed_of_a_benched_worker() -> None:
    """c had applied step 2 before it lost its rank. a and b train 2 again, twice: from 1, as b's
    copy of the second one is lost, too. What c has of step 2 is no part of either history."""
    script = script_of(2, 4, multiple_of=2).run(**FOUR)
    script.train(1)
    void = script.live("c", 2)
    lose(script, "d", 1)
    script.resume()
    script.train(2)
    script.tell(CollectiveFailed, "a", 2, 2, "reset")
    for worker in "ab":
        script.paused(worker, script.live(worker, 2))
    source = assignment_in(script.paused("c", void)).source  # it has not heard that it is benched
    assert (source.step, source.generation) == (2, 2)
    assert source.holders == {"pp0.s0.tp0": (("a", Tier.LIVE), ("b", Tier.LIVE))}
    script.resume()
    for worker in "ab":
        script.tell(WorkerLost, worker, "killed")
    script.paused("c", void)
    script.ready("e", "n5")
    assert script.status == "failed"  # and not: trained on from a state that never was


def test_a_worker_left_over_gives_its_shard_first_and_then_idles() -> None:
    script = script_of(2, 4, multiple_of=2, strategy="fsdp", copies=2).run(**FOUR)
    script.train(1)
    script.tell(WorkerLost, "d", "killed")
    for worker in ("a", "b", "c"):
        commands = script.paused(worker, script.live(worker, 1), *script.copies(worker, 1))
    assert [m.worker for m in assignment_in(commands).donors] == ["c"]
    assert of(Bench, commands) == []
    commands = script.resume()
    assert of(Bench, commands) == [Bench("c", 2, 1)]
    assert of(ReleaseWorker, commands) == []
    assert script.state.benched == {"c": 2}  # what it holds still counts
    assert script.tell(WorkerLost, "c", "killed") == [KillWorker("c", "it is lost: killed")]


def test_tensor_parallel_groups_share_a_node_where_they_can() -> None:
    nodes = {"a": "n1", "b": "n2", "c": "n1", "d": "n2", "e": "n1", "f": "n2"}
    script = script_of(2, 6, strategy="fsdp", tp=2, multiple_of=2).run(**nodes)
    assert script.ranks == ("a", "c", "b", "d", "e", "f")
    lose(script, "c", 0)
    assert script.ranks == ("a", "e", "b", "d")
    assert script.assignment.layout == Layout(dp_shard=2, tp=2)
    assert script.state.idle == {"f": "worlds are multiples of 2"}


def test_a_whole_node_is_better_than_two_halves() -> None:
    nodes = {"a": "n1", "b": "n1", "c": "n2", "d": "n2"}
    script = script_of(2, 4, strategy="fsdp", tp=2, multiple_of=2, from_scratch=True)
    script.run(**nodes).train(1)
    lose(script, "b", 1)
    assert script.ranks == ("c", "d")
    assert script.state.idle == {"a": "worlds are multiples of 2"}


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
def test_the_largest_allowed_world_is_formed(each: int, low: int, span: int, spares: int) -> None:
    least, most = low * each, (low + span - 1) * each
    script = script_of(least, most, multiple_of=each, spares=spares)
    for number in range(low * each + span):
        script.ready(f"w{number}", f"n{number}")
    if script.state.phase == "starting":
        script.fire("gather")
    if script.state.phase == "forming":
        able = min(low * each + span, most) // each * each
        assert len(script.ranks) <= able
        assert len(script.ranks) % each == 0


# ------------------------------------------------------------------------------- spares


def test_a_spare_takes_a_lost_members_place_in_the_same_generation() -> None:
    script = script_of(2, 3, spares=1)
    assert script.state.phase == "starting"
    script.ready("a", "n1")
    script.ready("b", "n2")
    assignment_in(script.ready("c", "n3"))  # it does not wait for the spare
    script.resume()
    assert script.ready("s", "n4") == []
    script.train(1)
    lose(script, "b", 1)
    assert script.ranks == ("a", "c", "s")
    script.resume()
    assert script.journalled("spare_used") == ["s was warm and takes the place of b"]
    assert script.ready("t", "n2") == []  # the next spare


def test_the_spare_on_a_node_without_a_member_goes_first() -> None:
    script = script_of(2, 3, spares=2).run(a="n1", b="n2", c="n3")
    script.ready("s", "n1")
    script.ready("t", "n4")
    lose(script, "b", 0)
    assert script.ranks == ("a", "c", "t")


def test_a_draining_member_is_replaced_before_it_is_dropped() -> None:
    script = script_of(3, 3, spares=1).run(a="n1", b="n2", c="n3")
    script.ready("s", "n4")
    script.tell(NodeDraining, "n2", script.now_s + 60, "spot")
    pause_all(script, 0)
    assert script.ranks == ("a", "c", "s")


def test_the_host_is_asked_for_the_spares_too() -> None:
    script = script_of(1, 3, spares=2).run(a="n1", b="n2", c="n3")
    assert WantWorkers(4, "resize") in script.tell(ResizeRequested, 2, "r1")


# -------------------------------------------------------------------------------- resize


def test_shrinking_releases_the_last_ranks_at_a_boundary() -> None:
    script = script_of(1, 4).run(**FOUR)
    script.train(1)
    commands = script.tell(ResizeRequested, 2, "r1")
    assert commands == [
        WantWorkers(2, "resize"),
        PauseWorkers(2, ("a", "b", "c", "d"), False, "2 workers were asked for, not 4"),
        StartTimer("boundary", 2, 70),
    ]
    assert of(ReleaseWorker, pause_all(script, 1)) == []  # what they hold is not safe yet
    assert script.ranks == ("a", "b")
    assert of(ReleaseWorker, script.resume()) == [
        ReleaseWorker("c", "2 workers are wanted"),
        ReleaseWorker("d", "2 workers are wanted"),
    ]
    (recovery,) = script.state.recoveries
    assert (recovery.cause, recovery.steps_lost, recovery.world_after) == ("resized", 0, 2)
    assert script.ready("e", "n5") == []  # nobody asked for it


def test_one_worker_is_one() -> None:
    script = script_of(1, 4).run(**FOUR)
    script.train(1)
    commands = script.tell(ResizeRequested, 1, "r1")
    assert of(PauseWorkers, commands)[0].reason == "1 worker was asked for, not 4"
    assert script.journalled("resize_requested") == ["1 worker is wanted"]


def test_who_has_the_only_copy_gives_it_before_it_is_released() -> None:
    script = script_of(1, 3, strategy="fsdp", copies=1).run(a="n1", b="n2", c="n3")
    script.train(1)
    script.tell(ResizeRequested, 1, "r1")
    commands = pause_all(script, 1)
    assert [m.worker for m in assignment_in(commands).donors] == ["b", "c"]
    assert of(ReleaseWorker, commands) == []
    released = of(ReleaseWorker, script.resume())
    assert [command.worker for command in released] == ["b", "c"]


def test_growing_again_asks_for_workers_and_takes_them_at_once() -> None:
    script = script_of(1, 4).run(**FOUR)
    script.tell(ResizeRequested, 2, "r1")
    pause_all(script, 0)
    script.resume()
    assert script.tell(ResizeRequested, 3, "r2") == [WantWorkers(3, "resize")]
    assert of(PauseWorkers, script.ready("e", "n5"))


@pytest.mark.parametrize("workers", [0, 1, 5, 8])
def test_what_can_not_be_is_refused(workers: int) -> None:
    script = script_of(2, 6, multiple_of=2).run(a="n1", b="n2")
    assert script.tell(ResizeRequested, workers, "r1") == []
    assert len(script.journalled("resize_refused")) == 1
    assert script.state.target is None


def test_a_spare_outlives_a_shrink_and_a_released_member_does_not() -> None:
    script = script_of(1, 3, spares=1).run(a="n1", b="n2", c="n3")
    script.ready("s", "n4")
    script.tell(ResizeRequested, 2, "r1")
    pause_all(script, 0)
    assert script.ranks == ("a", "b")
    assert of(ReleaseWorker, script.resume()) == [ReleaseWorker("c", "3 workers are wanted")]
    (reason,) = [why for event, why in script.journal if event == "generation_formed"][1:]
    assert reason.endswith("; idle: s (a spare)")
