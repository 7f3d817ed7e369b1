"""Who joins, who is drained, and how a job waits, stops or fails."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import Source, Tier
from elastic_ft.core.commands import (
    FinishJob,
    KillWorker,
    PauseWorkers,
    ReleaseWorker,
    RollBack,
    StartTimer,
    StopAtBoundary,
    WantWorkers,
)
from elastic_ft.core.events import (
    CheckpointCommitted,
    CollectiveFailed,
    JobStarted,
    NodeDraining,
    NodeLost,
    ResizeRequested,
    ShardsWritten,
    StopRequested,
    WorkerDone,
    WorkerLost,
    WorkerRaised,
)
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from tests.core.jobs import NO_WAY, SHARD, ddp, fsdp
from tests.core.script import Script, assignment_in

# --------------------------------------------------------------------------- join and drain


def test_joiners_that_come_together_join_together_at_a_boundary() -> None:
    script = ddp(max_workers=4).run(a="n1")
    assert script.ready("b", "n2") == [StartTimer("join", 1, 0.5)]
    assert script.ready("c", "n3") == [StartTimer("join", 1, 0.5)]
    assert script.fire("join") == [
        PauseWorkers(2, ("a",), False, "b, c join"),
        StartTimer("boundary", 2, 70),
    ]
    assert script.fire("join", 1) == []
    assert [m.worker for m in assignment_in(script.paused("a", script.live("a", 0))).members] == [
        *"abc"
    ]
    script.resume()
    assert script.state.recoveries[0].cause == "worker_joined"
    assert len(script.journalled("worker_joined")) == 2


def test_the_last_joiner_that_fits_is_not_waited_for() -> None:
    script = ddp(max_workers=2).run(a="n1")
    assert script.ready("b", "n2")[0] == PauseWorkers(2, ("a",), False, "b joins")
    script.ready("c", "n3")  # a spare
    assert [m.worker for m in assignment_in(script.paused("a")).members] == ["a", "b"]


def test_a_joiner_lost_before_the_batch_closes_disturbs_nobody() -> None:
    script = ddp().run(a="n1")
    script.ready("b", "n2")
    assert script.tell(WorkerLost, "b", "killed") == [KillWorker("b", "it is lost: killed")]
    assert script.fire("join") == []


def test_a_boundary_that_does_not_come_is_forced_and_has_its_full_deadline_then() -> None:
    script = ddp().run(a="n1", b="n2")
    script.ready("c", "n3")
    script.paused("a")
    assert script.fire("boundary") == [
        PauseWorkers(2, ("b",), True, "b reached no step boundary in time"),
        StartTimer("pause", 2, 10),
    ]
    assert script.fire("boundary") == []
    assert script.fire("pause")[0] == KillWorker("b", "it reached no safe point in time")


def test_a_loss_on_the_way_to_a_boundary_breaks_off() -> None:
    script = ddp().run(a="n1", b="n2")
    script.ready("c", "n3")
    assert script.tell(WorkerLost, "b", "killed") == [
        KillWorker("b", "it is lost: killed"),
        PauseWorkers(2, ("a",), True, "b: killed"),
        StartTimer("pause", 2, 10),
    ]
    assert [m.worker for m in assignment_in(script.paused("a")).members] == ["a", "c"]


def test_a_drained_worker_gives_its_state_before_it_leaves() -> None:
    """b alone has its shard of step 2: it takes part as a donor, and goes when all have theirs."""
    script = fsdp().run(a="n1", b="n2", c="n3")
    script.train(1)
    script.train(2, held=False)
    assert script.tell(NodeDraining, "n2", script.now_s + 30, "spot") == [
        PauseWorkers(2, ("a", "b", "c"), False, "b leaves a draining node"),
        StartTimer("boundary", 2, 70),
    ]
    for worker in "ab":
        script.paused(worker, script.live(worker, 2))
    assignment = assignment_in(script.paused("c", script.live("c", 2)))
    assert [m.worker for m in assignment.members] == ["a", "c"]
    assert [m.worker for m in assignment.donors] == ["b"]
    assert assignment.source.holders["pp0.s1.tp0"] == (("b", Tier.LIVE),)
    reason = "it has handed over its state; its node is draining"
    assert ReleaseWorker("b", reason) in script.resume()
    assert script.state.recoveries[0].cause == "node_draining"
    assert script.tell(NodeLost, "n2", "preempted") == []


def test_a_drained_worker_that_others_can_do_without_leaves_at_once() -> None:
    script = ddp().run(a="n1", b="n2")
    script.tell(NodeDraining, "n2", script.now_s + 30, "spot")
    script.paused("b", script.live("b", 0))
    commands = script.paused("a", script.live("a", 0))
    assert commands[0] == ReleaseWorker("b", "its node is draining")
    assert assignment_in(commands).donors == ()


def test_a_drained_worker_whose_buddy_has_its_shard_gives_nothing() -> None:
    """It has it nearer, but would be waited for, and asked, by those who stay."""
    script = fsdp().run(a="n1", b="n2", c="n3")
    script.train(1)
    script.tell(NodeDraining, "n2", script.now_s + 30, "spot")
    held = {w: (script.live(w, 1), *script.copies(w, 1)) for w in script.ranks}
    for worker in "ab":
        script.paused(worker, *held[worker])
    assignment = assignment_in(script.paused("c", *held["c"]))
    assert [m.worker for m in assignment.members] == ["a", "c"]
    assert assignment.donors == ()
    assert all(holder != "b" for who in assignment.source.holders.values() for holder, _ in who)


def test_a_drain_below_min_workers_is_deferred_until_replacements_come() -> None:
    script = ddp(min_workers=2).run(a="n1", b="n2")
    assert script.tell(NodeDraining, "n2", script.now_s + 60, "spot") == []
    assert len(script.journalled("drain_deferred")) == 1
    commands = script.ready("c", "n3")
    assert commands == [StartTimer("join", 1, 0.5)]
    script.fire("join")
    script.paused("a", script.live("a", 0))
    assignment = assignment_in(script.paused("b", script.live("b", 0)))
    assert [m.worker for m in assignment.members] == ["a", "c"]


def test_while_a_drain_is_deferred_a_broken_group_forms_with_all_again() -> None:
    """b trains on until its node goes: a pause for another reason must not suspend the job."""
    script = ddp(min_workers=2).run(a="n1", b="n2")
    script.tell(NodeDraining, "n2", script.now_s + 60, "spot")
    script.tell(CollectiveFailed, "a", 1, 1, "reset")
    script.paused("a")
    assert [m.worker for m in assignment_in(script.paused("b")).members] == ["a", "b"]


def test_a_joiner_too_few_does_not_suspend_a_job_with_a_deferred_drain() -> None:
    script = ddp(min_workers=3, max_workers=4).run(a="n1", b="n2", c="n2")
    script.tell(NodeDraining, "n2", script.now_s + 60, "spot")
    assert script.ready("d", "n3")  # 4 with those that drain: it joins them
    for worker in "abc":
        commands = script.paused(worker)
    assert [m.worker for m in assignment_in(commands).members] == [*"abcd"]


def test_a_worker_that_gets_ready_on_a_draining_node_is_sent_away() -> None:
    script = ddp().run(a="n1")
    script.tell(NodeDraining, "n2", script.now_s + 60, "spot")
    assert script.ready("b", "n2")[0] == ReleaseWorker("b", "its node is draining")


def test_who_does_not_end_when_released_is_killed() -> None:
    script = ddp().run(a="n1")
    script.tell(NodeDraining, "n2", script.now_s + 60, "spot")
    for worker in ("b", "c"):
        (timer,) = [c for c in script.ready(worker, "n2") if isinstance(c, StartTimer)]
        assert timer.after_s == script.policy.release_timeout_s
    script.tell(WorkerLost, "b", "released")
    assert script.fire("release b", 0) == []
    (killed,) = [c for c in script.fire("release c", 0) if isinstance(c, KillWorker)]
    assert killed.worker == "c" and "released" in killed.reason
    assert script.state.phase == "running"


# ------------------------------------------------------------------- suspend, stop, user errors


def suspended(**more: float) -> Script:
    script = ddp(min_workers=2, **more).run(a="n1", b="n2")
    script.train(1)
    script.tell(WorkerLost, "b", "killed")
    commands = script.paused("a", script.live("a", 1))
    assert commands == [StartTimer("suspend", 2, 1800)]
    assert script.state.phase == "suspended"
    return script


def test_below_min_workers_the_job_waits_and_goes_on_with_a_replacement() -> None:
    script = suspended()
    assignment = assignment_in(script.ready("c", "n3"))
    assert (assignment.generation, assignment.source.step) == (3, 1)
    assert assignment.source.holders == {SHARD: (("a", Tier.LIVE),)}
    script.resume()
    assert script.state.recoveries[0].cause == "worker_lost"
    assert script.fire("suspend", 2) == []


def test_what_a_suspended_worker_held_dies_with_it() -> None:
    script = suspended(from_scratch=True)
    script.tell(WorkerLost, "a", "killed")
    script.ready("c", "n3")
    commands = script.ready("d", "n4")
    assert isinstance(commands[0], RollBack)
    assert assignment_in(commands).source == Source(0, Tier.INITIAL)


def test_the_seed_is_no_source_once_steps_are_recorded() -> None:
    script = suspended()
    script.tell(WorkerLost, "a", "killed")
    script.ready("c", "n3")
    commands = script.ready("d", "n4")
    assert not [c for c in commands if isinstance(c, RollBack)]
    why = NO_WAY.format("no state is held and no checkpoint is good", 1)
    assert commands[-1] == FinishJob("failed", f"{why}; training broke off: b: killed")


def test_an_error_that_costs_all_state_is_told_at_the_end() -> None:
    """Where a worker's process ends with its train loop, and no snapshot was there yet."""
    script = ddp().run(a="n1", b="n2")
    script.train(1)
    script.tell(WorkerRaised, "a", 1, 1, "ValueError: no good")
    for worker in ("a", "b"):
        script.tell(WorkerLost, worker, "its connection ended")
    script.ready("c", "n3")
    finish = script.state.finish
    assert finish is not None and finish.status == "failed"
    assert finish.reason.endswith("training broke off: a raised: ValueError: no good")


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_run_folder_with_steps_and_no_checkpoint_is_not_begun_anew_unasked(
    from_scratch: bool,
) -> None:
    script = Script(Policy(1, 1, from_scratch=from_scratch))
    script.state = State()  # of a controller that starts
    commands = script.tell(JobStarted, (), 3, 120)
    if from_scratch:
        assert commands[0] == WantWorkers(1, "max_workers")
    else:
        why = NO_WAY.format("there is no checkpoint", 120)
        assert commands == [WantWorkers(0, "the job has ended"), FinishJob("failed", why)]


def test_suspension_ends() -> None:
    script = suspended()
    finish = script.fire("suspend")[-1]
    assert isinstance(finish, FinishJob) and finish.status == "suspended"
    assert "1 workers after 1800 s suspended, min_workers is 2" in finish.reason


def test_a_stop_lets_the_step_end_and_names_the_checkpoint() -> None:
    script = ddp().run(a="n1", b="n2")
    assert script.tell(StopRequested, "SIGINT") == [
        StopAtBoundary(("a", "b"), "SIGINT"),
        StartTimer("stop", 0, 120),
    ]
    script.train(1)
    for worker in "ab":
        script.tell(ShardsWritten, worker, 1, 1, ())
    script.tell(WorkerDone, "a", 1, 1, "digest")
    assert script.tell(WorkerDone, "b", 1, 1) == []  # the checkpoint is being published
    commands = script.tell(CheckpointCommitted, 1, "s3://b/1", 1, 0.1)
    reason = "SIGINT; last good checkpoint: step 1, s3://b/1"
    assert commands[-1] == FinishJob("stopped", reason, "digest")


def test_a_stop_is_told_again_to_those_who_form_after_it() -> None:
    script = ddp().run(a="n1", b="n2")
    script.tell(StopRequested, "SIGINT")
    script.tell(WorkerLost, "b", "killed")
    script.paused("a")
    assert script.resume() == [StopAtBoundary(("a",), "SIGINT")]
    assert script.ready("c", "n3") == []  # nobody joins any more
    assert script.fire("join") == []


@pytest.mark.parametrize("again", ["asked twice", "not in time"])
def test_a_stop_has_an_end(again: str) -> None:
    script = ddp().run(a="n1")
    script.tell(StopRequested, "SIGINT")
    if again == "asked twice":
        finish = script.tell(StopRequested, "SIGINT")[-1]
    else:
        finish = script.fire("stop", 0)[-1]
    assert isinstance(finish, FinishJob) and finish.status == "stopped"


def test_a_stop_before_anything_runs_is_immediate() -> None:
    finish = ddp().tell(StopRequested, "SIGINT")[-1]
    assert finish == FinishJob("stopped", "SIGINT; there is no checkpoint")


def test_user_code_that_raises_on_every_rank_has_failed_once() -> None:
    script = ddp(max_user_failures=1).run(a="n1", b="n2", c="n3")
    reason = "a raised: ValueError"
    assert script.tell(WorkerRaised, "a", 1, 5, "ValueError")[0] == PauseWorkers(
        2, ("a", "b", "c"), True, reason
    )
    assert script.tell(WorkerRaised, "b", 1, 5, "ValueError") == []
    assert script.tell(WorkerRaised, "c", 1, 5, "ValueError") == []
    for worker in "abc":
        script.paused(worker)
    script.resume()
    finish = script.tell(WorkerRaised, "b", 2, 5, "ValueError")[-1]
    assert isinstance(finish, FinishJob) and finish.status == "failed"
    assert finish.reason.startswith("b raised at step 5, 2 times in a row: ValueError")


def test_what_raises_on_the_way_to_a_boundary_is_not_waited_for_there() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(ResizeRequested, 2, "r")
    assert script.state.phase == "pausing" and not script.state.abort
    assert script.tell(WorkerRaised, "a", 1, 1, "ValueError") == [
        PauseWorkers(2, ("a", "b", "c"), True, "a raised: ValueError"),
        StartTimer("pause", 2, 10),
    ]


def test_retries_are_counted_until_a_step_goes_by() -> None:
    def phase_after(*steps: int) -> str:
        script = ddp(max_user_failures=1).run(a="n1")
        for generation, number in enumerate(steps, start=1):
            script.tell(WorkerRaised, "a", generation, number, "ValueError")
            if script.state.phase == "ended":
                break
            script.paused("a")
            script.resume()
        return script.state.phase

    assert phase_after(5, 7, 9) == "running"
    assert phase_after(5, 5) == "ended"
    assert phase_after(5, 6) == "ended", "step 5 was kept, and what follows it raises again"


def test_what_the_user_must_fix_is_not_retried() -> None:
    script = ddp().run(a="n1")
    finish = script.tell(WorkerRaised, "a", 1, 0, "DataError: no such file", usage=True)[-1]
    assert isinstance(finish, FinishJob) and finish.status == "failed"
