"""How often to copy and to write: against the formula's own optimum, and at the edges."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ft.core.commands import Command, CommitCheckpoint, StartTimer, TakeCheckpoint
from elastic_ft.core.events import CheckpointCommitted, CollectiveFailed, ShardsWritten
from elastic_ft.core.intervals import (
    SNAPSHOT_INTERVALS,
    Cadence,
    checkpoint_every_s,
    snapshot_every,
)
from elastic_ft.core.policy import Policy
from tests.core.script import Script


@given(st.floats(1e-4, 10), st.floats(1e-3, 100), st.floats(0.001, 0.5))
@example(5.0, 5.0, 1 / 3)  # three steps would do exactly, and rounding says that they don't
def test_a_snapshot_costs_no_more_than_its_share(
    cost_s: float, step_s: float, share: float
) -> None:
    every = snapshot_every(cost_s, step_s, share, 1000)
    largest = every == SNAPSHOT_INTERVALS[-1]
    assert largest or cost_s <= every * step_s * share * (1 + 1e-9)
    if every > 1:
        before = SNAPSHOT_INTERVALS[SNAPSHOT_INTERVALS.index(every) - 1]
        assert cost_s > before * step_s * share * (1 - 1e-9), "a shorter interval would have done"


def test_what_a_failure_makes_redo_is_bounded() -> None:
    assert snapshot_every(100.0, 0.1, 0.01, 7) == 7


def test_a_generation_begins_with_a_snapshot_each_step_and_learns() -> None:
    cadence = Cadence(None, 0.01, 50)
    changed = []
    for step in range(1, 6):
        if step >= cadence.next:
            cadence.taken(step)
        changed.append(cadence.learn(0.004, 0.1))
    assert changed == [False, False, False, True, False]
    assert cadence.every == 5


def test_a_fixed_number_is_kept() -> None:
    cadence = Cadence(3, 0.01, 50)
    assert not any(cadence.learn(1.0, 0.1) for _ in range(10))
    assert cadence.every == 3


def lost_share(interval_s: float, write_s: float, between_s: float) -> float:
    """Daly's model: the expected run time per useful second."""
    work = math.exp(write_s / between_s) * (math.exp((interval_s + write_s) / between_s) - 1)
    return between_s * work / interval_s


@given(st.floats(0.5, 60), st.floats(600, 1e6))
def test_dalys_interval_is_near_the_optimum(write_s: float, between_s: float) -> None:
    chosen = lost_share(checkpoint_every_s(write_s, between_s), write_s, between_s)
    grid = (between_s * 1.02**-n for n in range(600))
    assert chosen <= min(lost_share(s, write_s, between_s) for s in grid if s > write_s / 10) * 1.01


def test_the_interval_follows_cost_and_failures() -> None:
    assert checkpoint_every_s(5, 3600) < checkpoint_every_s(20, 3600)
    assert checkpoint_every_s(5, 3600) > checkpoint_every_s(5, 600)
    assert checkpoint_every_s(100, 10) == 10


# ------------------------------------------------------------------ as the core applies it


def due(script: Script) -> list[Command]:
    return [c for c in script.fire("checkpoint") if isinstance(c, TakeCheckpoint)]


def test_a_checkpoint_is_asked_for_when_it_is_due_and_something_is_new() -> None:
    script = Script(Policy(1, 2, checkpoint_every_s=30.0))
    script.run(a="n1", b="n2")
    assert due(script) == [], "nothing is committed yet"
    script.train(1)
    assert due(script) == [TakeCheckpoint("a")]
    script.tell(ShardsWritten, "a", 1, 1, ({"of": "a"},))
    assert due(script) == [], "b is still writing"


def test_a_checkpoint_that_takes_longer_is_written_less_often() -> None:
    script = Script(Policy(1, 2, checkpoint_auto=True))
    script.run(a="n1", b="n2")
    script.train(1)
    publish(script, 1, took_s=50.0, seconds=5.0)
    (reason,) = script.journalled("checkpoint_interval")
    assert reason.startswith("writing one takes 55.0 s: one is due every ")


def publish(script: Script, step: int, took_s: float, seconds: float) -> None:
    """Both write their part of a checkpoint, b in half the time that a takes; it is published."""
    for worker, share in (("a", 1.0), ("b", 0.5)):
        script.tell(ShardsWritten, worker, 1, step, ({"of": worker},), took_s=took_s * share)
    script.tell(CheckpointCommitted, step, "url", 10, seconds)


def test_when_a_checkpoint_was_asked_for_does_not_change_what_one_takes() -> None:
    """By the timer, every so many steps, or at a stop: an hour in, one of 0.2 s takes 0.2 s."""
    script = Script(Policy(1, 2, checkpoint_auto=True)).run(a="n1", b="n2")
    script.now_s += 20.0
    script.train(1)
    publish(script, 1, took_s=0.195, seconds=0.005)
    assert script.state.uploads.writes_s == pytest.approx((0.2,))
    (reason,) = script.journalled("checkpoint_interval")
    assert reason.startswith("writing one takes 0.2 s: one is due every ")


def test_one_slow_upload_is_no_new_truth() -> None:
    script = Script(Policy(1, 2, checkpoint_auto=True)).run(a="n1", b="n2")
    for number in range(1, 10):
        script.train(number)
        publish(script, number, took_s=90.0 if number == 6 else 2.0, seconds=0.0)
    assert len(script.journalled("checkpoint_interval")) == 1, "5 s assumed, then 2 s measured"


def waits_s(commands: list[Command]) -> list[float]:
    return [c.after_s for c in commands if isinstance(c, StartTimer) and c.timer == "checkpoint"]


def test_a_clock_that_is_set_back_puts_no_checkpoint_off() -> None:
    script = Script(Policy(1, 2, checkpoint_every_s=60.0)).run(a="n1", b="n2")
    script.train(1)
    script.now_s -= 3600.0
    began_s = script.now_s
    for _ in range(3):  # nor does it stay put off while generations come and go
        script.tell(CollectiveFailed, "a", script.state.generation, 0, "reset")
        for worker in "ab":
            script.paused(worker, script.live(worker, 1))
        (wait_s,) = waits_s(script.resume())
        assert script.now_s + wait_s <= began_s + 75.0


def test_a_clock_that_is_set_back_makes_no_failures_of_what_were_none() -> None:
    """The time that a job has run for is never negative: Daly's M stays what was assumed."""
    script = Script(Policy(1, 2, checkpoint_auto=True)).run(a="n1", b="n2")
    script.train(1)
    script.now_s -= 86400.0
    assert waits_s(script.fire("checkpoint"))[0] > 300.0


def test_what_a_snapshots_step_takes_longer_counts_if_it_is_more() -> None:
    cadence = Cadence(None, 0.01, 50)
    duration, ran = 0.1, False
    for step in range(1, 200):
        cadence.learn(0.004 if ran else 0.0, duration)
        duration = 0.11 if ran else 0.1  # of this step, told in the next
        ran = step >= cadence.next
        if ran:
            cadence.taken(step)
    assert cadence.every == 12, "10 ms of 100, not the 4 that were accounted for"


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_move_the_interval(seed: int) -> None:
    """Steps of 250 ms that vary by a third, snapshots of 4 ms: 2 would do, and no other is far."""
    noise, cadence = random.Random(seed), Cadence(None, 0.01, 50)
    ran, duration, changes = False, 0.25, []
    for step in range(1, 400):
        if cadence.learn(0.004 * noise.uniform(0.7, 2.0) if ran else 0.0, duration):
            changes.append(cadence.every)
        duration = 0.25 * noise.uniform(0.8, 1.35) + 0.004 * ran
        ran = step >= cadence.next
        if ran:
            cadence.taken(step)
    assert len(changes) <= 5 and max(changes) <= 12, changes  # without care: 15, and 32


# ------------------------------------------------------------------- what a checkpoint is of


def test_a_checkpoint_has_the_tensors_of_all_who_wrote() -> None:
    """Of a model in stages each has others."""
    script = Script(Policy(1, 2)).run(a="n1", b="n2")
    script.train(1)
    first, second = {"0.weight": ("float32", (2,))}, {"1.weight": ("float32", (3,))}
    script.tell(ShardsWritten, "a", 1, 1, ({"of": "a"},), first)
    commit = script.tell(ShardsWritten, "b", 1, 1, ({"of": "b"},), second)[0]
    assert commit == CommitCheckpoint(1, 1, ({"of": "a"}, {"of": "b"}), first | second)


def test_commits_out_of_order_do_not_forget_the_newest_checkpoint() -> None:
    script = Script(Policy(1, 2, keep_last=1))
    script.run(a="n1", b="n2")
    script.train(1, 2)
    script.tell(CheckpointCommitted, 2, "two", 10, 1.0)
    script.tell(CheckpointCommitted, 1, "one", 10, 1.0)
    assert [ref.url for ref in script.state.checkpoints] == ["two"]
