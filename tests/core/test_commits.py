"""When a step and when a checkpoint count: event by event, the exact commands."""

from __future__ import annotations

from typing import Any

from elastic_ft.core.assignment import Tier
from elastic_ft.core.commands import (
    AbandonCheckpoint,
    CommitCheckpoint,
    FinishJob,
    RecordStep,
    StartTimer,
)
from elastic_ft.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CollectiveFailed,
    ResizeRequested,
    ShardsFailed,
    ShardsWritten,
    StepApplied,
    StepHeld,
    WorkerDone,
    WorkerLost,
)
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import CLOSED_KEPT
from tests.core.script import Script, assignment_in


def ddp() -> Script:
    return Script(Policy(1, 2)).run(a="n1", b="n2")


def fsdp() -> Script:
    return Script(Policy(1, 2, strategy="fsdp")).run(a="n1", b="n2")


def ddp_with_keepers() -> Script:
    script = Script(Policy(1, 2))
    script.keeper("n1")
    script.keeper("n2")
    return script.run(a="n1", b="n2")


def hsdp() -> Script:
    policy = Policy(1, 4, strategy="hsdp", shard_size=2)
    return Script(policy).run(a="n1", b="n2", c="n3", d="n4")


def record(step: int, layout: str, generation: int = 1, world_size: int = 2) -> RecordStep:
    return RecordStep(step, generation, world_size, layout, {"loss": 1.0 / step})


def publishing(step: int, generation: int) -> list[Any]:
    timer = StartTimer(f"publish {step} {generation}", 0, 1800)
    return [CommitCheckpoint(step, generation, BOTH), timer]


def recorded(commands: list[Any]) -> list[int]:
    return [c.step for c in commands if isinstance(c, RecordStep)]


def regroup(script: Script, *held: int) -> list[Any]:
    """The group breaks without a loss; a and b hold the steps ``held`` live; all form again."""
    script.tell(CollectiveFailed, "a", script.state.generation, 0, "reset")
    lives = dict(zip("ab", held, strict=True))
    for worker, number in lives.items():
        commands = script.paused(worker, script.live(worker, number))
    assignment_in(commands)
    return commands + script.resume()


# -------------------------------------------------------------------------------- steps


def test_replicated_state_commits_when_everyone_has_applied_it() -> None:
    script = ddp()
    assert script.applied("a", 1) == []
    assert script.applied("b", 1) == [record(1, "ddp2")]


def test_replicated_state_waits_for_the_snapshot_that_outlives_the_controller() -> None:
    script = ddp_with_keepers()
    script.applied("a", 1)
    assert script.applied("b", 1) == []
    assert script.tell(StepHeld, "a", 1, 1) == [record(1, "ddp2")]
    assert script.applied("b", 2) == []
    script.applied("a", 2)
    assert script.tell(StepHeld, "b", 1, 2) == []  # nobody asked it to
    assert script.tell(StepHeld, "a", 1, 2) == [record(2, "ddp2")]


def test_sharded_state_commits_when_it_is_held_in_two_places() -> None:
    script = fsdp()
    script.applied("a", 1)
    assert script.applied("b", 1) == []
    assert script.tell(StepHeld, "a", 1, 1) == []
    assert script.tell(StepHeld, "b", 1, 1) == [record(1, "fsdp2")]


def test_a_snapshot_commits_the_steps_before_it_too() -> None:
    script = fsdp()
    assert script.train(1, 2, held=False) == []
    assert script.train(3) == [record(1, "fsdp2"), record(2, "fsdp2"), record(3, "fsdp2")]


def test_replicas_of_a_cut_state_are_held_as_well() -> None:
    """a and d apply a step, b and c die before: without snapshots no step would be whole."""
    script = hsdp()
    assert script.assignment.buddies == ((),) * 4
    assert script.train(1, held=False) == []
    assert recorded(script.train(1)) == [1]


def test_steps_commit_in_order_however_the_messages_come() -> None:
    script = ddp()
    script.applied("a", 1)
    script.applied("a", 2)
    assert recorded(script.applied("b", 1)) == [1]
    assert recorded(script.applied("b", 2)) == [2]


def test_what_is_told_twice_counts_once() -> None:
    script = ddp()
    script.applied("a", 1)
    assert script.applied("a", 1) == []
    script.applied("b", 1)
    assert script.applied("b", 1) == []
    assert script.state.pending == {}


def test_survivors_still_commit_while_they_pause() -> None:
    script = ddp()
    script.applied("a", 1)
    script.tell(CollectiveFailed, "a", 1, 1, "reset")
    assert script.tell(StepApplied, "b", 1, 1, {"loss": 1.0}) == [record(1, "ddp2")]


def test_a_dead_workers_report_does_not_count_but_its_step_does() -> None:
    """b applied step 1 and died, its message lost: a has the state, so the step is kept."""
    script = ddp()
    script.applied("a", 1)
    script.tell(WorkerLost, "b", "killed")
    assert script.tell(StepApplied, "b", 1, 1) == []
    script.paused("a", script.live("a", 1))
    assert script.resume() == [record(1, "ddp2")]  # as it was computed: by two


def test_a_restored_step_nobody_reported_is_recorded_all_the_same() -> None:
    script = ddp()
    commands = regroup(script, 1, 1)  # both hold step 1, and no StepApplied ever came
    assert [c for c in commands if isinstance(c, RecordStep)] == [RecordStep(1, 1, 2, "ddp2", {})]
    assert recorded(script.train(2)) == [2]


def test_sharded_steps_wait_for_the_new_copies_after_a_restore() -> None:
    script = fsdp()
    script.train(1)
    script.train(2, held=False)
    assert recorded(regroup(script, 2, 2)) == []
    assert script.tell(StepHeld, "a", 2, 2) == []
    assert recorded(script.tell(StepHeld, "b", 2, 2)) == [2]


def test_nothing_commits_while_a_generation_forms() -> None:
    """Not even what all hold already: who is still restoring may yet refuse the source."""
    script = fsdp()
    script.train(1)
    script.train(2, held=False)
    script.tell(CollectiveFailed, "a", 1, 2, "reset")
    for worker in "ab":
        script.paused(worker, script.live(worker, 2))
    assert script.state.phase == "forming"
    for worker in "ab":
        assert recorded(script.tell(StepHeld, worker, 2, 2)) == []
    assert recorded(script.resume()) == [2]


def test_a_copy_counts_for_nothing_where_replicas_are_enough() -> None:
    script = ddp()
    script.applied("a", 1)
    script.tell(StepHeld, "a", 1, 1)
    assert script.tell(StepHeld, "b", 1, 1) == []


# -------------------------------------------------------------------------- checkpoints


def write(script: Script, step: int, *workers: str, generation: int = 1) -> list[Any]:
    commands: list[Any] = []
    for worker in workers:
        commands += script.tell(ShardsWritten, worker, generation, step, ({"of": worker},))
    return commands


BOTH = ({"of": "a"}, {"of": "b"})


def test_a_checkpoint_is_published_when_all_shards_are_written() -> None:
    script = ddp()
    script.train(1)
    assert write(script, 1, "a") == []
    assert write(script, 1, "b") == publishing(1, 1)
    script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    assert [(ref.step, ref.generation) for ref in script.state.checkpoints] == [(1, 1)]


def test_no_checkpoint_is_ahead_of_the_record() -> None:
    script = fsdp()
    script.train(1, held=False)
    assert write(script, 1, "a", "b") == []
    script.tell(StepHeld, "a", 1, 1)
    assert script.tell(StepHeld, "b", 1, 1) == [record(1, "fsdp2"), *publishing(1, 1)]


def test_uploads_go_on_across_a_change_of_generation() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a")
    regroup(script, 1, 1)
    script.train(2)
    assert write(script, 1, "b") == publishing(1, 1)


def test_an_upload_that_lost_a_writer_is_abandoned() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a")
    reason = "b left before writing its shards"
    assert AbandonCheckpoint(1, 1, reason) in script.tell(WorkerLost, "b", "killed")
    assert write(script, 1, "a") == []  # late: it is over


def test_an_upload_begun_after_its_writer_was_lost_is_abandoned_too() -> None:
    script = ddp()
    script.train(1)
    script.tell(WorkerLost, "b", "killed")
    reason = "b left or was done before writing its shards"
    assert write(script, 1, "a") == [AbandonCheckpoint(1, 1, reason)]


def test_a_failed_upload_is_abandoned_and_training_goes_on() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a")
    commands = script.tell(ShardsFailed, "b", 1, 1, "disk full")
    assert commands == [AbandonCheckpoint(1, 1, "b: disk full")]
    assert script.state.phase == "running"


def test_the_checkpoint_of_a_step_that_one_member_alone_applied_is_abandoned() -> None:
    """b is rolled forward to step 1 from a's state: it never begins that checkpoint."""
    script = ddp()
    script.applied("a", 1)
    write(script, 1, "a")
    commands = regroup(script, 1, 0)
    reason = "not every writer reached its step: 0 was the last"
    assert AbandonCheckpoint(1, 1, reason) in commands
    assert recorded(commands) == [1]
    for worker in "ab":
        commands = script.tell(WorkerDone, worker, 2, 1)
    assert isinstance(commands[-1], FinishJob)  # nothing holds it up


def test_the_checkpoint_of_a_voided_step_is_never_published() -> None:
    """Step 2 was computed, written, voided and computed again: the first one is no history."""
    script = fsdp()
    script.train(1)
    script.train(2, held=False)
    write(script, 2, "a")
    reason = "not every writer reached its step: 1 was the last"
    assert AbandonCheckpoint(2, 1, reason) in regroup(script, 1, 1)
    assert write(script, 2, "b", "a") == []
    script.train(2)
    assert script.state.uploads.attempts == ()


def test_the_checkpoint_of_a_voided_step_does_not_begin_late() -> None:
    """Nobody had said that it writes step 2 when that was voided; it would be complete."""
    script = fsdp()
    script.train(1)
    script.train(2, held=False)
    regroup(script, 1, 1)
    assert write(script, 2, "a", "b") == []
    assert script.state.uploads.attempts == ()
    commands = script.train(2)
    assert recorded(commands) == [2]
    assert not [c for c in commands if isinstance(c, CommitCheckpoint)]


def test_told_twice_an_upload_does_not_begin_again() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a", "b")
    script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    assert write(script, 1, "a") == []
    assert script.state.uploads.attempts == ()


def test_told_again_long_after_its_end_an_upload_does_not_begin_again() -> None:
    """Of the last ones alone it is known that they have ended; what is older has, too."""
    script = ddp()
    for number in range(1, CLOSED_KEPT + 2):
        script.train(number)
        write(script, number, "a", "b")
        script.tell(CheckpointCommitted, number, f"s3://b/{number}", 10, 0.1)
    assert write(script, 1, "a") == []
    assert script.state.uploads.attempts == ()


def test_what_is_being_published_outlasts_generations_and_nothing_else_does() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a", "b")
    script.train(2)
    write(script, 2, "a")
    commands = []
    for number in (2, 3, 4, 5):
        commands += regroup(script, number, number)
        script.train(number + 1)
    abandoned = [c for c in commands if isinstance(c, AbandonCheckpoint)]
    assert abandoned == [AbandonCheckpoint(2, 1, "its generation is too old")]
    script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    assert [ref.step for ref in script.state.checkpoints] == [1]


def test_a_step_gets_one_checkpoint() -> None:
    """Uploads of one step from two generations: the second waits for what becomes of the first."""
    script = ddp()
    script.train(1)
    write(script, 1, "a", "b")
    regroup(script, 1, 1)
    assert write(script, 1, "a", "b", generation=2) == []
    reason = "this step has a checkpoint already"
    commands = script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    assert commands == [AbandonCheckpoint(1, 2, reason)]


def test_the_job_ends_with_a_second_checkpoint_that_comes_to_nothing() -> None:
    script = Script(Policy(1, 2, spares=1)).run(a="n1", b="n2")
    script.train(1)
    write(script, 1, "a")
    script.tell(ResizeRequested, 1, "r1")
    for worker in "ab":
        script.paused(worker, script.live(worker, 1))
    assert script.ranks == ("a",)  # and b, now a spare, is still writing
    script.resume()
    write(script, 1, "a", generation=2)
    script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    assert script.tell(WorkerDone, "a", 2, 1) == []
    assert isinstance(write(script, 1, "b")[-1], FinishJob)


def test_if_the_first_fails_the_second_is_published() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a", "b")
    regroup(script, 1, 1)
    write(script, 1, "a", "b", generation=2)
    assert script.tell(CheckpointFailed, 1, "503") == publishing(1, 2)


def test_checkpoints_older_than_those_kept_are_forgotten() -> None:
    script = ddp()
    for number in (1, 2, 3):
        script.train(number)
        write(script, number, "a", "b")
        script.tell(CheckpointCommitted, number, f"s3://b/{number}", 10, 0.1)
    assert [ref.step for ref in script.state.checkpoints] == [3, 2]


# ------------------------------------------------------------------------------ the end


def test_the_job_completes_when_all_are_done_and_all_is_committed() -> None:
    script = fsdp()
    script.train(1, held=False)
    script.tell(WorkerDone, "a", 1, 1, "digest")
    assert script.tell(WorkerDone, "b", 1, 1, "digest") == []
    script.tell(StepHeld, "a", 1, 1)
    commands = script.tell(StepHeld, "b", 1, 1)
    assert commands[0] == record(1, "fsdp2")
    assert commands[-1] == FinishJob("completed", "all 1 steps are committed", "digest")


def test_the_last_checkpoint_is_waited_for() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a", "b")
    for worker in "ab":
        assert script.tell(WorkerDone, worker, 1, 1) == []
    finish = script.tell(CheckpointFailed, 1, "503")[-1]
    assert isinstance(finish, FinishJob) and finish.status == "completed"


def test_a_job_whose_last_state_is_in_no_checkpoint_is_not_complete() -> None:
    """It was: nothing went on from it any more, and the store had an older state."""
    script = Script(Policy(1, 2, final_checkpoint=True)).run(a="n1", b="n2")
    script.train(1)
    write(script, 1, "a", "b")
    for worker in "ab":
        assert script.tell(WorkerDone, worker, 1, 1) == []
    finish = script.tell(CheckpointFailed, 1, "503")[-1]
    said = "all 1 steps are committed, but not in a checkpoint; there is no checkpoint"
    assert finish == FinishJob("suspended", said)


def test_nor_is_one_with_an_older_checkpoint() -> None:
    script = Script(Policy(1, 2, final_checkpoint=True)).run(a="n1", b="n2")
    for number in (1, 2):
        script.train(number)
        write(script, number, "a", "b")
        if number == 1:
            script.tell(CheckpointCommitted, 1, "s3://b/1", 10, 0.1)
    for worker in "ab":
        assert script.tell(WorkerDone, worker, 1, 2) == []
    finish = script.tell(CheckpointFailed, 2, "503")[-1]
    said = (
        "all 2 steps are committed, but not in a checkpoint; last good checkpoint: step 1, s3://b/1"
    )
    assert finish == FinishJob("suspended", said)


def test_an_upload_its_writer_has_forgotten_does_not_hold_up_the_end() -> None:
    script = ddp()
    script.train(1)
    write(script, 1, "a")
    script.tell(WorkerDone, "a", 1, 1)
    commands = script.tell(WorkerDone, "b", 1, 1)
    assert commands[0] == AbandonCheckpoint(1, 1, "b was done before writing its shards")
    assert isinstance(commands[-1], FinishJob)


def test_an_upload_begun_after_a_writer_was_done_does_not_hold_up_the_end() -> None:
    """a began the last checkpoint in generation 1; b never did, and is done in generation 2."""
    script = ddp()
    script.train(1)
    regroup(script, 1, 1)
    script.tell(WorkerDone, "b", 2, 1)
    reason = "b left or was done before writing its shards"
    assert write(script, 1, "a") == [AbandonCheckpoint(1, 1, reason)]
    assert isinstance(script.tell(WorkerDone, "a", 2, 1)[-1], FinishJob)


def test_one_alone_holds_nothing_and_commits_at_once() -> None:
    script = Script(Policy(1, 1, strategy="fsdp")).run(a="n1")
    assert script.assignment.source.tier is Tier.INITIAL
    assert recorded(script.applied("a", 1)) == [1]
