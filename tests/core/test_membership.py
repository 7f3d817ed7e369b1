"""The failure state machine, event by event: what it is told, and exactly what it asks for."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import CheckpointRef, Holding, Source, Tier
from elastic_ft.core.commands import (
    AbandonCheckpoint,
    FinishJob,
    FormGeneration,
    KillWorker,
    PauseWorkers,
    ReleaseWorker,
    StartTimer,
    WantWorkers,
)
from elastic_ft.core.events import (
    CollectiveFailed,
    NobodyMoves,
    NodeLost,
    Paused,
    Restoring,
    Resumed,
    ShardsWritten,
    SourceRefused,
    StepApplied,
    StepHeld,
    WorkerDone,
    WorkerHung,
    WorkerLost,
    WorkerRaised,
)
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.policy import Policy
from tests.core.jobs import SHARD, WHOLE, ddp, recorded
from tests.core.script import Script, assignment_in, member

# ---------------------------------------------------------------------------- the start


def test_a_job_asks_for_all_workers_and_starts_with_those_that_come_in_time() -> None:
    script = ddp(min_workers=2, max_workers=3)
    assert script.state.phase == "starting"
    assert script.ready("a", "n1") == []
    assert script.ready("b", "n2") == [StartTimer("gather", 0, 10)]
    commands = script.fire("gather")
    assignment = assignment_in(commands)
    assert commands == [FormGeneration(assignment), StartTimer("form", 1, 60)]
    assert (assignment.generation, assignment.source) == (1, Source(0, Tier.INITIAL))
    assert assignment.members == (member("a", "n1"), member("b", "n2"))
    assert assignment.layout == Layout(dp_replicate=2)


def test_all_workers_there_is_nothing_to_gather_for() -> None:
    script = ddp(min_workers=1, max_workers=2)
    script.ready("a", "n1")
    assert assignment_in(script.ready("b", "n2")).generation == 1
    assert script.resume() == []
    assert script.state.phase == "running"
    assert len(script.journalled("generation_formed")) == 1


def test_too_few_workers_at_the_deadline_end_the_job() -> None:
    script = ddp(min_workers=2)
    script.ready("a", "n1")
    commands = script.fire("start")
    reason = "1 workers ready after 300 s, min_workers is 2"
    assert commands == [
        WantWorkers(0, "the job has ended"),
        ReleaseWorker("a", "the job has ended"),
        FinishJob("failed", reason),
    ]
    assert script.ready("b", "n2") == []  # it has ended


def test_why_workers_end_before_they_are_ready_is_said_at_the_deadline() -> None:
    """Of a model whose import ends the process, "0 workers ready" was all that a user was told."""
    script = ddp(min_workers=1)
    script.tell(WorkerLost, "a", "its process died")
    script.tell(WorkerLost, "b", "its connection ended")
    script.tell(WorkerLost, "b", "SystemExit: no licence")
    script.tell(WorkerLost, "a", "its connection ended")  # the last that came to its end counts
    script.tell(WorkerLost, "c", "released", asked=True)
    why = "; b: its connection ended, SystemExit: no licence"
    reason = f"0 workers ready after 300 s, min_workers is 1{why}"
    assert FinishJob("failed", reason) in script.fire("start")


def test_a_job_goes_on_from_its_newest_checkpoint() -> None:
    refs = (CheckpointRef(20, "s3://b/20"), CheckpointRef(10, "s3://b/10"))
    script = Script(Policy(1, 1), *refs)
    assignment = assignment_in(script.ready("a", "n1"))
    assert assignment.source == Source(20, Tier.CHECKPOINT, url="s3://b/20")
    assert script.state.committed == 20
    script.resume()
    assert recorded(script.applied("a", 21)) == [21]


# --------------------------------------------------------------------------------- loss


def test_a_killed_worker_pauses_the_others_and_the_rest_go_on_from_their_live_state() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.train(1, 2)
    assert script.tell(WorkerLost, "b", "killed", silent_s=0.01) == [
        KillWorker("b", "it is lost: killed"),  # cut off, perhaps alive
        PauseWorkers(2, ("a", "c"), True, "b: killed"),
        StartTimer("pause", 2, 10),
    ]
    assert script.paused("a", script.live("a", 2)) == []
    commands = script.paused("c", script.live("c", 2))
    assignment = assignment_in(commands)
    assert commands == [FormGeneration(assignment), StartTimer("form", 2, 60)]
    assert assignment.source.holders == {SHARD: (("a", Tier.LIVE), ("c", Tier.LIVE))}
    assert (assignment.source.step, script.ranks) == (2, ("a", "c"))
    script.resume()
    (recovery,) = script.state.recoveries
    assert (recovery.cause, recovery.steps_lost, recovery.world_after) == ("worker_lost", 0, 2)
    assert recovery.survivors_kept_pid and recovery.noticed_s == 0.01


def test_the_same_loss_seen_by_another_observer_is_no_news() -> None:
    script = ddp().run(a="n1", b="n2")
    script.tell(WorkerLost, "b", "its connection ended")
    assert script.tell(WorkerLost, "b", "its actor died") == []
    assert len(script.journalled("worker_lost")) == 1


def test_where_nobody_moves_all_break_off_and_nobody_is_accused() -> None:
    script = ddp().run(a="n1", b="n2")
    assert script.tell(NobodyMoves, 0, "nobody moved for 20 s") == []  # of a generation before
    assert script.tell(NobodyMoves, 1, "nobody moved for 20 s") == [
        PauseWorkers(2, ("a", "b"), True, "nobody moved for 20 s"),
        StartTimer("pause", 2, 10),
    ]
    assert script.tell(NobodyMoves, 1, "nobody moved for 20 s") == []
    script.paused("a")
    script.paused("b")
    script.resume()
    assert script.state.recoveries[0].cause == "collective_failed"


def test_a_broken_collective_pauses_at_once_and_the_loss_behind_it_gets_the_blame() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    reason = "a saw its group break: peer closed"
    assert script.tell(CollectiveFailed, "a", 1, 1, "peer closed") == [
        PauseWorkers(2, ("a", "b", "c"), True, reason),
        StartTimer("pause", 2, 10),
    ]
    assert script.tell(CollectiveFailed, "c", 1, 1, "timeout") == []
    script.paused("a")
    script.paused("c")
    commands = script.tell(WorkerLost, "b", "killed")
    assert assignment_in(commands).generation == 2  # no new one: nothing has formed in it yet
    script.resume()
    assert script.state.recoveries[0].cause == "worker_lost"


def test_a_hung_worker_is_killed_and_never_heard_again() -> None:
    script = ddp().run(a="n1", b="n2")
    assert script.tell(WorkerHung, "b", "stood still for 60 s")[:2] == [
        KillWorker("b", "stood still for 60 s"),
        PauseWorkers(2, ("a",), True, "b: stood still for 60 s"),
    ]
    assert script.paused("b", Holding(9, WHOLE, SHARD, Tier.LIVE)) == []
    assert "b" not in script.state.paused


def test_who_reaches_no_safe_point_in_time_is_killed() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(WorkerLost, "c", "killed")
    script.paused("a")
    commands = script.fire("pause")
    assert commands[0] == KillWorker("b", "it reached no safe point in time")
    assert [m.worker for m in assignment_in(commands).members] == ["a"]


def test_a_second_failure_while_pausing_waits_for_the_rest_only() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", script.live("a", 0))
    commands = script.tell(WorkerLost, "c", "killed, too")
    assert [m.worker for m in assignment_in(commands).members] == ["a"]
    assert script.state.generation == 2


def test_a_second_failure_while_forming_opens_the_next_generation() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(WorkerLost, "b", "killed")
    script.paused("a")
    script.paused("c")
    assert script.state.phase == "forming"
    assert script.tell(WorkerLost, "c", "killed, too") == [
        KillWorker("c", "it is lost: killed, too"),
        PauseWorkers(3, ("a",), True, "c: killed, too"),
        StartTimer("pause", 3, 10),
    ]
    assert script.tell(Resumed, "a", 2, 0) == []  # of the generation that never formed
    assert assignment_in(script.paused("a")).generation == 3
    script.resume()
    (recovery,) = script.state.recoveries  # one episode, from the first loss to the end
    assert (recovery.world_before, recovery.world_after) == (3, 1)


def test_a_generation_that_does_not_form_in_time_is_given_up() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(WorkerLost, "c", "killed")
    script.paused("a")
    script.paused("b")
    reason = "not formed within 60 s, in which no byte of its state came"
    assert script.fire("form")[0] == PauseWorkers(3, ("a", "b"), True, reason)


def test_forming_has_the_time_that_its_world_needs_not_that_of_the_largest_that_may_be() -> None:
    small = ddp(min_workers=2, max_workers=4096)
    small.ready("a", "n1")
    small.ready("b", "n2")
    assert small.fire("gather")[-1] == StartTimer("form", 1, 60)
    large = ddp(min_workers=1, max_workers=228)
    commands: list[object] = []
    for number in range(228):
        commands = large.ready(f"w{number}", f"n{number}")
    assert commands[-1] == StartTimer("form", 1, 65)


def test_a_generation_whose_state_still_comes_is_not_given_up() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.tell(WorkerLost, "c", "killed")
    script.paused("a")
    script.paused("b")
    for received in range(10):
        assert script.tell(Restoring, "b", 2, received) == []
        assert script.fire("form") == [StartTimer("form", 2, 60)]
    script.tell(Restoring, "b", 1, 99)  # late
    script.tell(Restoring, "c", 2, 99)  # out
    assert script.fire("form")[0].generation == 3


def test_generations_without_a_committed_step_are_limited() -> None:
    script = ddp(max_generations_without_progress=2).run(a="n1")
    for _ in range(2):
        script.tell(CollectiveFailed, "a", script.state.generation, 0, "flaky")
        script.paused("a")
        script.resume()
    commands = script.tell(CollectiveFailed, "a", script.state.generation, 0, "flaky")
    assert isinstance(commands[-1], FinishJob) and commands[-1].status == "failed"
    assert "2 generations without a committed step" in commands[-1].reason


def test_a_committed_step_gives_new_patience() -> None:
    script = ddp(max_generations_without_progress=1).run(a="n1")
    for number in (1, 2, 3):
        script.train(number)
        script.tell(CollectiveFailed, "a", script.state.generation, number, "flaky")
        script.paused("a", script.live("a", number))
        script.resume()
    assert script.state.phase == "running"


def test_a_lost_node_takes_its_workers_and_those_are_killed_for_good() -> None:
    script = ddp(max_workers=3).run(a="n1", b="n2", c="n2")
    commands = script.tell(NodeLost, "n2", "no heartbeat")
    assert commands == [
        KillWorker("b", "node n2 is lost"),
        KillWorker("c", "node n2 is lost"),
        PauseWorkers(2, ("a",), True, "b, c: no heartbeat"),
        StartTimer("pause", 2, 10),
    ]


def test_a_nodes_loss_that_is_noticed_after_its_workers_gets_the_blame() -> None:
    script = ddp().run(a="n1", b="n2")
    script.tell(WorkerLost, "b", "its connection ended")
    script.paused("a")
    script.resume()
    assert script.state.recoveries[0].cause == "worker_lost"
    script.tell(NodeLost, "n2", "no heartbeat")
    assert script.state.recoveries[0].cause == "node_lost"


def test_so_does_one_that_is_noticed_while_the_others_pause() -> None:
    script = ddp().run(a="n1", b="n2")
    script.tell(WorkerLost, "b", "its connection ended")
    script.tell(NodeLost, "n2", "no heartbeat")
    script.paused("a")
    script.resume()
    assert script.state.recoveries[0].cause == "node_lost"


def test_a_worker_that_was_lost_before_it_was_ready_stays_out() -> None:
    """The host's sentinel is faster than the worker's connection."""
    script = ddp(max_workers=2).run(a="n1")
    script.tell(WorkerLost, "b", "exit code 1")
    assert script.ready("b", "n2") == []
    assert list(script.state.ready) == ["a"]


# ------------------------------------------------------------------------------------- I1


def test_nothing_from_an_older_generation_changes_anything() -> None:
    script = ddp().run(a="n1", b="n2", c="n3")
    script.train(1)
    script.tell(WorkerLost, "c", "killed")
    script.paused("a", script.live("a", 1))
    script.paused("b", script.live("b", 1))
    script.resume()
    before = script.state
    late = (
        (StepApplied, "a", 1, 2),
        (StepHeld, "a", 1, 2),
        (StepApplied, "c", 2, 2),
        (CollectiveFailed, "a", 1, 1, "reset"),
        (WorkerRaised, "b", 1, 1, "ValueError"),
        (Paused, "a", 1, ()),
        (Paused, "a", 2, ()),
        (Resumed, "a", 1, 0),
        (SourceRefused, "a", 1, "b", "damaged"),
        (WorkerDone, "a", 1, 1),
        (WorkerDone, "c", 2, 1),
        (ShardsWritten, "a", 0, 1, ()),
    )
    for kind, *args in late:
        assert script.tell(kind, *args) == [], kind
        assert script.state == before, kind
    for timer in ("gather", "start", "join", "boundary", "pause", "form", "suspend"):
        assert script.fire(timer, 1) == []
    assert script.state == before


@pytest.mark.parametrize("phase", ["pausing", "forming"])
def test_nothing_from_an_older_generation_changes_what_is_being_formed(phase: str) -> None:
    """Where the phase would take it, the generation must not."""
    script = ddp(max_workers=4).run(a="n1", b="n2", c="n3", d="n4")
    script.train(1)
    script.tell(WorkerLost, "d", "killed")  # generation 2
    for worker in "abc":
        script.paused(worker, script.live(worker, 1))
    script.tell(Resumed, "a", 2, 1)
    script.tell(CollectiveFailed, "b", 2, 1, "reset")  # 3, paused by a alone so far
    script.paused("a", script.live("a", 1))
    if phase == "forming":
        for worker in "bc":
            script.paused(worker, script.live(worker, 1))
    assert (script.state.phase, script.state.generation) == (phase, 3)
    before = script.state
    late = (
        (Paused, "b", 1, ()),
        (Paused, "b", 2, (Holding(7, WHOLE, SHARD, Tier.LIVE),)),
        (Resumed, "b", 1, 0),
        (Resumed, "b", 2, 1),
        (SourceRefused, "b", 1, "a", "damaged"),
        *([(SourceRefused, "b", 2, "a", "damaged")] if phase == "forming" else []),
    )
    for kind, *args in late:
        assert script.tell(kind, *args) == [], (kind, args)
        assert script.state == before, (kind, args)


def test_the_end_is_the_end_even_with_a_joiner_waiting() -> None:
    """The last step commits while a generation forms: no next one opens after FinishJob."""
    script = ddp(max_workers=3).run(a="n1", b="n2")
    script.applied("a", 1)
    script.tell(CollectiveFailed, "b", 1, 1, "reset")
    script.paused("a", script.live("a", 1))
    script.paused("b", script.live("b", 0))
    script.ready("c", "n3")
    script.tell(Resumed, "a", 2, 1)
    for worker in "ab":
        script.tell(WorkerDone, worker, 2, 1)
    commands = script.tell(Resumed, "b", 2, 1)
    assert recorded(commands) == [1]
    assert isinstance(commands[-1], FinishJob)
    assert script.state.phase == "ended"


def test_a_worker_done_in_the_old_generation_is_not_done_in_the_new_one() -> None:
    script = ddp().run(a="n1", b="n2")
    script.train(1)
    script.tell(WorkerLost, "a", "killed")
    script.tell(WorkerDone, "b", 1, 1)
    script.paused("b", script.live("b", 1))
    assert script.state.done == 0
    assert script.resume() == []
    assert isinstance(script.tell(WorkerDone, "b", 2, 1)[-1], FinishJob)


def test_an_abandoned_upload_is_told_to_the_host() -> None:
    script = ddp().run(a="n1", b="n2")
    script.train(1)
    script.tell(ShardsWritten, "a", 1, 1, ())
    reason = "b left before writing its shards"
    assert AbandonCheckpoint(1, 1, reason) in script.tell(WorkerLost, "b", "killed")
