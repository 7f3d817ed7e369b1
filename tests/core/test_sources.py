"""Which state a generation goes on from: a live one, a buddy's copy, a checkpoint; none damaged."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import CheckpointRef, Holding, Source, Tier
from elastic_ft.core.commands import CommitCheckpoint, FinishJob, PauseWorkers, RollBack, StartTimer
from elastic_ft.core.events import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointFailed,
    CollectiveFailed,
    ShardsWritten,
    SourceRefused,
    WorkerDone,
    WorkerLost,
)
from elastic_ft.core.policy import Policy
from tests.core.jobs import NO_WAY, SHARD, ddp, fsdp, recorded
from tests.core.script import Script, assignment_in


def test_ddp_rolls_a_straddled_step_forward() -> None:
    """a has applied step 3, c has not, b is gone: c gets a's state and the step counts (I4)."""
    script = ddp().run(a="n1", b="n2", c="n3")
    script.train(1, 2)
    script.applied("a", 3)
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", script.live("a", 3))
    source = assignment_in(script.paused("c", script.live("c", 2))).source
    assert (source.step, source.holders) == (3, {SHARD: (("a", Tier.LIVE),)})
    assert script.state.committed == 2  # not before everyone has it
    assert recorded(script.resume()) == [3]


def test_fsdp_rolls_a_straddled_step_back_to_the_snapshot_of_the_lost_ones_buddy() -> None:
    script = fsdp().run(a="n1", b="n2", c="n3")
    assert script.assignment.buddies == ((1,), (2,), (0,))  # c keeps b's copy
    script.train(1, 2)
    script.applied("a", 3)
    script.applied("b", 3)
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", script.live("a", 3), *script.copies("a", 2))
    source = assignment_in(script.paused("c", script.live("c", 2), *script.copies("c", 2))).source
    assert (source.step, source.tier) == (2, Tier.PEER)
    assert source.holders == {
        "pp0.s0.tp0": (("a", Tier.HOST),),
        "pp0.s1.tp0": (("c", Tier.PEER),),
        "pp0.s2.tp0": (("c", Tier.LIVE), ("c", Tier.HOST), ("a", Tier.PEER)),
    }
    assert 3 not in script.state.pending  # void: it is computed again
    assert recorded(script.resume()) == []


def test_losing_both_copies_falls_back_to_the_checkpoint_loudly() -> None:
    script = Script(Policy(1, 3, strategy="fsdp"), CheckpointRef(10, "s3://b/10"))
    script.run(a="n1", b="n2", c="n3").train(11, 12)
    script.tell(WorkerLost, "b", "killed")
    script.tell(WorkerLost, "c", "killed")
    commands = script.paused("a", script.live("a", 12), *script.copies("a", 12))
    lost = (
        "2 committed steps are lost with all who held their state: "
        "nothing newer than checkpoint 10 is complete in memory; step 12 lacks pp0.s1.tp0"
    )
    assert commands[0] == RollBack(10, lost)
    assert assignment_in(commands).source == Source(10, Tier.CHECKPOINT, url="s3://b/10")
    assert script.journalled("rolled_back") == [lost]
    script.resume()
    assert script.state.recoveries[0].steps_lost == 2


def test_a_rollback_waits_for_a_checkpoint_that_is_being_published() -> None:
    """Published behind the core's back, it would be ahead of the record (I2)."""
    script = fsdp(max_workers=2).run(a="n1", b="n2")
    script.train(1, 2)
    for worker in "ab":
        commands = script.tell(ShardsWritten, worker, 1, 2, ({"of": worker},))
    both = ({"of": "a"}, {"of": "b"})
    assert commands == [CommitCheckpoint(2, 1, both), StartTimer("publish 2 1", 0, 1800)]
    script.tell(WorkerLost, "b", "killed")
    assert script.paused("a", script.live("a", 2)) == []  # it could only start over
    assert script.journalled("awaiting_checkpoint")
    source = assignment_in(script.tell(CheckpointCommitted, 2, "s3://b/2", 100, 0.1)).source
    assert (source.step, source.tier, source.url) == (2, Tier.CHECKPOINT, "s3://b/2")
    assert source.holders == {
        "pp0.s0.tp0": (("a", Tier.LIVE),),
        "pp0.s1.tp0": (("s3://b/2", Tier.CHECKPOINT),),
    }


def test_a_refused_checkpoint_of_some_shards_is_given_up_and_memory_is_not() -> None:
    refs = (CheckpointRef(10, "s3://b/10"), CheckpointRef(5, "s3://b/5"))
    script = Script(Policy(1, 2, strategy="fsdp", copies=1), *refs)
    script.run(a="n1", b="n2").tell(WorkerLost, "b", "killed")
    source = assignment_in(script.paused("a", script.live("a", 10))).source
    assert source.holders["pp0.s1.tp0"] == (("s3://b/10", Tier.CHECKPOINT),)
    script.tell(SourceRefused, "a", 2, "s3://b/10", "digest differs")
    assert script.journalled("checkpoint_refused") == ["digest differs"]
    held = Holding(10, "pp1.s2.tp1", "pp0.s0.tp0", Tier.LIVE)
    assert assignment_in(script.paused("a", held)).source == Source(
        5, Tier.CHECKPOINT, url="s3://b/5"
    )


def test_a_checkpoint_that_then_fails_lets_the_rollback_go_on() -> None:
    script = fsdp(max_workers=2, from_scratch=True).run(a="n1", b="n2")
    script.train(1, 2)
    for worker in "ab":
        script.tell(ShardsWritten, worker, 1, 2, ())
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", script.live("a", 2))
    commands = script.tell(CheckpointFailed, 2, "503")
    assert isinstance(commands[0], RollBack) and commands[0].step == 0
    assert assignment_in(commands).source == Source(0, Tier.INITIAL)


def publishing_for_ever(**more: float) -> Script:
    """The publisher never answers: a hung mount, say."""
    script = fsdp(max_workers=2, **more).run(a="n1", b="n2")
    script.train(1, 2, 3)
    for worker in "ab":
        script.tell(ShardsWritten, worker, 1, 2, ())
    return script


def test_a_checkpoint_that_is_never_published_is_not_waited_for_for_ever() -> None:
    """It is not rolled back either: it may yet appear, ahead of the record (I2)."""
    script = publishing_for_ever(from_scratch=True)
    for worker in "ab":
        script.tell(WorkerLost, worker, "killed")
    script.ready("c", "n3")
    assert script.ready("d", "n4") == [] and script.journalled("awaiting_checkpoint")
    finish = script.fire("publish 2 1", 0)[-1]
    assert isinstance(finish, FinishJob) and finish.status == "suspended"
    assert finish.reason.startswith("the checkpoint of step 2 may yet be published, and no state")
    assert finish.reason.endswith("there is no checkpoint")


def test_a_job_whose_last_checkpoint_is_never_published_ends_all_the_same() -> None:
    script = publishing_for_ever()
    for worker in "ab":
        script.tell(WorkerDone, worker, 1, 3, "digest")
    assert script.state.phase == "running"
    finish = script.fire("publish 2 1", 0)[-1]
    assert finish == FinishJob("completed", "all 3 steps are committed", "digest")
    assert script.journalled("checkpoint_failed") == ["neither published nor refused within 1800 s"]


@pytest.mark.parametrize("late", [CheckpointCommitted, CheckpointFailed])
def test_an_outcome_that_comes_late_counts(late: type) -> None:
    """The job trains on meanwhile, and nothing older than the step in doubt is gone back to."""
    script = publishing_for_ever()
    assert script.fire("publish 2 1", 0) == []
    assert script.state.uploads.unsettled_step == 2 and not script.state.uploads.attempts
    if late is CheckpointCommitted:
        script.tell(late, 2, "s3://b/2", 100, 0.1)
        assert [ref.url for ref in script.state.checkpoints] == ["s3://b/2"]
    else:
        script.tell(late, 2, "503")
    assert script.state.uploads.unsettled_step == 0
    assert script.fire("publish 2 1", 0) == []


def test_a_checkpoint_that_is_found_damaged_is_no_source_any_more() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    for number in (1, 2):
        script.tell(CheckpointCommitted, number, f"s3://b/{number}", 100, 0.1)
    assert script.tell(CheckpointDamaged, 2, "s3://b/2", "digest differs") == []
    assert [ref.url for ref in script.state.checkpoints] == ["s3://b/1"]
    assert script.journalled("checkpoint_refused") == ["digest differs"]
    script.tell(CheckpointDamaged, 2, "s3://b/2", "digest differs")
    assert len(script.journalled("checkpoint_refused")) == 1, "its readers found it, too"


def test_a_damaged_source_is_refused_and_the_next_one_taken() -> None:
    script = fsdp(max_workers=2).run(a="n1", b="n2")
    script.train(1)
    script.train(2, held=False)
    copies = {worker: (*script.copies(worker, 1),) for worker in "ab"}
    lives = {worker: script.live(worker, 1) for worker in "ab"}
    script.tell(CollectiveFailed, "a", 1, 2, "reset")
    script.paused("a", lives["a"], *copies["a"])
    source = assignment_in(script.paused("b", *copies["b"])).source
    assert source.holders["pp0.s1.tp0"] == (("b", Tier.HOST), ("a", Tier.PEER))
    reason = "b: digest differs"
    assert script.tell(SourceRefused, "a", 2, "b", "digest differs") == [
        PauseWorkers(3, ("a", "b"), True, reason),
        StartTimer("pause", 3, 10),
    ]
    script.paused("a", lives["a"], *copies["a"])
    source = assignment_in(script.paused("b", *copies["b"])).source
    assert source.holders["pp0.s1.tp0"] == (("a", Tier.PEER),)
    assert script.journalled("source_refused") == ["digest differs"]


def test_a_refused_checkpoint_makes_room_for_an_older_one() -> None:
    refs = (CheckpointRef(20, "s3://b/20"), CheckpointRef(10, "s3://b/10"))
    script = Script(Policy(1, 1), *refs)
    script.ready("a", "n1")
    script.tell(SourceRefused, "a", 1, "s3://b/20", "digest differs")
    commands = script.paused("a")
    assert isinstance(commands[0], RollBack) and commands[0].step == 10
    assert assignment_in(commands).source == Source(10, Tier.CHECKPOINT, url="s3://b/10")
    script.tell(SourceRefused, "a", 2, "s3://b/10", "cut short")
    why = NO_WAY.format("no state is held and no checkpoint is good", 10)
    why = f"{why}; training broke off: s3://b/20: digest differs"
    assert script.paused("a")[-1] == FinishJob("failed", why)
    assert script.journalled("checkpoint_refused") == ["digest differs", "cut short"]
