"""Another controller has the job: who is waited for, what is said again, what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ft.core import events as ev
from elastic_ft.core.commands import (
    Bench,
    CommitCheckpoint,
    FinishJob,
    FormGeneration,
    KillWorker,
    PauseWorkers,
    ReleaseWorker,
    StartTimer,
    StopAtBoundary,
    TakeCheckpoint,
    WantWorkers,
)
from elastic_ft.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CollectiveFailed,
    ControllerChanged,
    KeeperReturned,
    NodeLost,
    ResizeRequested,
    ShardsWritten,
    StopRequested,
    WorkerDone,
    WorkerLost,
)
from elastic_ft.core.layouts.layout import Strategy
from tests.core.adopted import POLICY, changed, returned, trained
from tests.core.script import Script, assignment_in, keeper_on

CHANGED = [WantWorkers(3, "the controller has changed"), StartTimer("return 2", 0, 2)]


def test_while_all_are_well_nothing_is_decided_anew() -> None:
    script = trained()
    before = script.state
    assert changed(script) == CHANGED
    assert returned(script, "c", "a", "b") == []
    assert script.state.generation == before.generation and script.state.phase == "running"
    assert script.journalled("adopted") == ["everyone has called controller 2, within 3.0 s"]
    assert script.fire("return 2", 0) == []
    script.train(3)
    assert script.state.committed == 3 and len(script.journalled("generation_formed")) == 1


def test_who_does_not_return_is_lost_together_and_once() -> None:
    script = trained(keepers=True)
    changed(script)
    returned(script, "c")
    script.tell(KeeperReturned, keeper_on("n2"))
    late = script.fire("return 2", 0)
    why = "it has not called the new controller within 2 s"
    assert late[:2] == [KillWorker("a", why), KillWorker("b", why)]
    (pause,) = [c for c in late if isinstance(c, PauseWorkers)]
    assert (pause.generation, pause.workers, pause.abort) == (2, ("c",), True)
    assert [reason for event, reason in script.journal if event == "keeper_lost"] == [
        f"{why}: until there is another, its workers keep their snapshots themselves"
    ]
    assert list(script.state.keepers) == ["n2"] and not script.state.left.awaited
    assert script.fire("return 2", 0) == []
    assert not script.journalled("adopted")
    form = assignment_in(script.paused("c", *script.copies("c", 2)))
    assert [m.worker for m in form.members] == ["c"]


def test_who_holds_what_nobody_else_has_may_call_as_long_as_it_looks() -> None:
    """The store that says who has the job was slow: 30 committed steps were given up with workers
    and keepers that lived, and were about to call."""
    script = trained(keepers=True)
    changed(script)
    assert script.fire("return 2", 0) == [StartTimer("return 2", 0, 2)]
    assert script.journalled("return_awaited") == [
        "not all of n1, n2 have called controller 2, and committed steps may be lost with them: "
        "they have 59 s more"
    ]
    assert script.fire("return 2", 0) == [StartTimer("return 2", 0, 2)], "said once"
    returned(script, "a", "b")
    script.tell(KeeperReturned, keeper_on("n1"))
    late = script.fire("return 2", 0)  # n1 has copies of all
    assert KillWorker("c", "it has not called the new controller within 6 s") in late
    assert script.state.committed == 2


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_who_never_calls_is_given_up_once_it_no_longer_looks(strategy: Strategy) -> None:
    script = trained(keepers=True, policy=replace(POLICY, strategy=strategy))
    changed(script)
    script.fire("return 2", 0)
    if strategy == "ddp":  # all of its state is with each
        returned(script, "c")
    else:
        script.now_s += POLICY.controller_timeout_s
    killed = [c for c in script.fire("return 2", 0) if isinstance(c, KillWorker)]
    assert [c.worker for c in killed] == ["a", "b", "c"][: 3 - (strategy == "ddp")]
    if strategy == "fsdp":
        assert killed[0].reason == "it has not called the new controller within 62 s"


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_who_may_have_all_that_is_left_of_a_lost_node_may_call(strategy: Strategy) -> None:
    script = trained(policy=replace(POLICY, strategy=strategy))
    changed(script)
    script.tell(NodeLost, "n1", "it went with the controller")
    late = script.fire("return 2", 0)
    assert not [c for c in late if isinstance(c, KillWorker)] and "c" in script.state.ready
    assert len(script.journalled("return_awaited")) == 1


def test_of_a_world_of_copies_one_that_has_called_is_enough() -> None:
    script = trained(policy=replace(POLICY, strategy="ddp"))
    changed(script)
    returned(script, "a")
    script.fire("return 2", 0)
    assert not script.journalled("return_awaited")
    assert script.state.ready.keys() == {"a"}


def test_who_looks_for_the_controller_is_not_late_for_a_pause() -> None:
    """It can't have heard of it. Who has called, and does not answer, is: within its own time."""
    script = trained()
    changed(script)
    script.tell(WorkerLost, "a", "killed")
    script.now_s += POLICY.pause_timeout_s
    assert not [c for c in script.fire("pause") if isinstance(c, KillWorker)]
    returned(script, "b", "c")
    late = [c.worker for c in script.fire("pause") if isinstance(c, KillWorker)]
    assert late == ["b", "c"]


def test_a_keeper_that_looks_for_the_controller_is_not_late_with_what_the_dead_left() -> None:
    script = trained(keepers=True)
    changed(script)
    for worker in "ab":
        script.tell(WorkerLost, worker, "killed")
    returned(script, "c")
    script.tell(KeeperReturned, keeper_on("n2"))
    script.paused("c", script.live("c", 2))
    script.now_s += POLICY.pause_timeout_s
    assert not [c for c in script.fire("keeper") if isinstance(c, FinishJob)]
    assert script.state.finish is None


def test_who_is_known_to_be_lost_is_not_waited_for() -> None:
    script = trained()
    changed(script)
    returned(script, "a", "b")
    script.tell(WorkerLost, "c", "its process has ended")
    assert script.state.adoption is not None and script.state.adoption.is_complete
    for worker in "ab":
        commands = script.paused(worker, *script.copies(worker, 2))
    assert [m.worker for m in assignment_in(commands).members] == ["a", "b"]


def test_a_return_timer_of_the_controller_before_says_nothing() -> None:
    script = trained()
    changed(script)
    script.tell(ControllerChanged, 3, "")
    assert script.fire("return 2", 0) == []
    assert script.fire("return 3", 0)


def test_nothing_forms_before_all_have_returned() -> None:
    """Who has not called can't be told what it has a part in."""
    script = trained()
    script.ready("d", "n3")  # a spare: nobody asks it to pause
    script.tell(WorkerLost, "c", "killed")
    script.paused("a", *script.copies("a", 2))
    changed(script)
    returned(script, "a")
    again = returned(script, "b")
    assert again == [
        PauseWorkers(2, ("b",), True, "asked again: the controller has changed"),
    ]
    assert script.paused("b", *script.copies("b", 2)) == []
    (form,) = [c for c in returned(script, "d") if isinstance(c, FormGeneration)]
    assert [m.worker for m in form.assignment.members] == ["a", "b", "d"]


def test_what_was_being_formed_is_given_up_and_nobody_is_blamed() -> None:
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    script.paused("a", *script.copies("a", 2))
    script.paused("b", *script.copies("b", 2))
    assert script.state.phase == "forming" and script.state.generation == 2
    fruitless, losses = script.state.blame.fruitless, script.state.blame.losses
    (_, pause, _, _) = changed(script)
    assert isinstance(pause, PauseWorkers)
    assert (pause.generation, pause.workers, pause.abort) == (3, ("a", "b"), True)
    again = returned(script, "a", "b")
    assert [c.workers for c in again if isinstance(c, PauseWorkers)] == [("a",), ("b",)]
    script.paused("a", *script.copies("a", 2))
    assert assignment_in(script.paused("b", *script.copies("b", 2))).source.step == 2
    assert (script.state.blame.fruitless, script.state.blame.losses) == (fruitless, losses)


def test_of_what_had_formed_unheard_it_is_told() -> None:
    """Its members train on in it, and the steps that they tell of are recorded as its own."""
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    script.paused("a", *script.copies("a", 2))
    script.paused("b", *script.copies("b", 2))
    script.tell(ev.Resumed, "a", 2, 2)
    changed(script)
    returned(script, "a", "b")
    before = len(script.journal)
    assert script.tell(ev.Resumed, "a", 2, 2) == []
    assert script.tell(ev.Resumed, "b", 2, 2) == []
    assert script.tell(ev.Resumed, "b", 2, 2) == []
    assert [event for event, _ in script.journal[before:]] == ["generation_formed"], "once"
    assert script.state.phase == "pausing"


def test_a_number_that_anybody_has_heard_of_is_never_used_again() -> None:
    """The journal's end was lost with its node: a pause was heard that nothing is known of."""
    script = trained()
    changed(script)
    assert returned(script, "a") == []
    (pause, _) = returned(script, "b", newest=7)
    assert isinstance(pause, PauseWorkers) and pause.generation == 8
    assert pause.workers == ("a", "b", "c")
    (again,) = returned(script, "c", newest=7)
    assert isinstance(again, PauseWorkers) and again.workers == ("c",)
    assert script.state.generation == 8


def test_a_number_heard_while_nothing_trains_is_passed_over() -> None:
    script = Script(replace(POLICY, min_workers=2))
    script.run(a="n1", b="n1")
    script.train(1)
    script.tell(WorkerLost, "b", "killed")
    script.paused("a", *script.copies("a", 1))
    assert script.state.phase == "suspended" and script.state.generation == 2
    changed(script)
    assert returned(script, "a", newest=5) == [] and script.state.generation == 2
    assert returned(script, "a", newest=3) == []
    assert assignment_in(script.ready("d", "n1")).generation == 6


def test_a_number_heard_by_who_is_lost_since_is_not_used_again() -> None:
    script = Script(POLICY)
    script.ready("a", "n1")
    changed(script)
    returned(script, "a", newest=5)
    script.tell(ControllerChanged, 3, "")
    script.tell(WorkerLost, "a", "killed")
    script.ready("b", "n1")
    assert assignment_in(script.fire("gather")).generation == 6


def test_who_has_heard_of_a_later_pause_is_not_asked_for_an_older_one() -> None:
    """It is fenced already: it would answer nothing, and be killed for that."""
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    changed(script)
    (pause, _) = returned(script, "b", newest=5)
    assert isinstance(pause, PauseWorkers) and pause.generation == 6


def test_a_boundary_that_nobody_could_tell_of_is_waited_for_anew() -> None:
    script = trained()
    script.tell(ResizeRequested, 2, "r")
    script.now_s += 600
    changed(script)
    assert script.fire("boundary") == [StartTimer("boundary", 2, POLICY.boundary_timeout_s - 1)]


def test_a_clock_that_is_set_back_gives_nobody_more_than_the_full_time() -> None:
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    changed(script)
    script.now_s -= 1000
    assert script.fire("pause") == [StartTimer("pause", 2, 10)]


def test_timers_of_who_was_to_answer_begin_anew_with_the_controller() -> None:
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    script.now_s += 60  # nobody was in charge for so long
    changed(script)
    returned(script, "a", "b")
    assert script.fire("pause") == [StartTimer("pause", 2, 7)]
    script.now_s += 9
    late = script.fire("pause")
    assert [c.worker for c in late if isinstance(c, KillWorker)] == ["a", "b"]


def test_a_stop_is_said_again_to_members() -> None:
    script = trained()
    script.tell(StopRequested, "asked")
    changed(script)
    assert returned(script, "b") == [StopAtBoundary(("b",), "asked")]


def test_who_has_no_rank_is_told_so_again() -> None:
    script = Script(replace(POLICY, multiple_of=2, max_workers=4))
    script.run(a="n1", b="n1", c="n2", d="n2")
    script.train(1)
    script.tell(WorkerLost, "d", "killed")
    for worker in "abc":
        script.paused(worker, *script.copies(worker, 1))
    script.resume()
    assert list(script.state.benched) == ["c"] and script.state.phase == "running"
    changed(script)
    assert returned(script, "c", "a", "b") == [Bench("c", 2, 1)]


def test_what_is_being_published_is_published_again() -> None:
    script = trained()
    shard = {"path": "x"}
    for worker in "abc":
        commands = script.tell(ShardsWritten, worker, 1, 2, (shard,))
    (commit,) = [c for c in commands if isinstance(c, CommitCheckpoint)]
    again = changed(script)
    assert again[1] == commit and len(again) == 3
    script.tell(CheckpointCommitted, 2, "url", 1, 0.1)
    assert script.tell(ControllerChanged, 3, "")[1:] == [StartTimer("return 3", 0, 2)]


def test_who_is_out_does_not_come_back_by_calling() -> None:
    script = trained()
    script.tell(WorkerLost, "c", "cut off")
    script.tell(ResizeRequested, 1, "r")
    changed(script)
    (kill,) = returned(script, "c")
    assert isinstance(kill, KillWorker) and kill.worker == "c"
    assert "c" not in script.state.ready


def test_who_was_released_is_released_again() -> None:
    script = trained()
    script.tell(ResizeRequested, 1, "r")
    for worker in "abc":
        script.paused(worker, script.live(worker, 2))
    released = [c.worker for c in script.resume() if isinstance(c, ReleaseWorker)]
    assert released
    changed(script)
    assert [type(c) for c in returned(script, released[0])] == [ReleaseWorker]


def test_an_end_is_said_again() -> None:
    script = trained()
    for worker in "abc":
        commands = script.tell(WorkerDone, worker, 1, 2, "digest")
    finish = commands[-1]
    assert isinstance(finish, FinishJob) and finish.state_digest == "digest"
    assert changed(script) == [WantWorkers(0, "the job has ended"), finish]
    assert returned(script, "a") == [ReleaseWorker("a", "the job has ended")]
    assert script.tell(CollectiveFailed, "a", 1, 2, "late") == []


@pytest.mark.parametrize("ready", [True, False])
def test_a_start_goes_on(ready: bool) -> None:
    script = Script(POLICY)
    if ready:
        script.ready("a", "n1")
    assert changed(script) == CHANGED
    assert returned(script, "a") == []
    script.ready("a", "n1")  # told again, or for the first time
    assert [m.worker for m in assignment_in(script.fire("gather")).members] == ["a"]


# ------------------------------------------------------------- found by the simulator


def test_a_second_failure_to_publish_says_nothing_of_the_first_time() -> None:
    """The controller before may have published it, and gone: none goes back behind what may yet
    appear."""
    script = trained()
    for worker in "abc":
        script.tell(ShardsWritten, worker, 1, 2, ({"path": "x"},))
    changed(script)
    script.tell(CheckpointFailed, 2, "the store is down")
    assert script.state.uploads.unsettled_step == 2
    for worker in "abc":
        commands = script.tell(WorkerLost, worker, "crashed")
    for worker in "def":
        commands = script.ready(worker, "n3")
        if script.status:
            break
    assert script.status == "suspended"
    finish = commands[-1]
    assert isinstance(finish, FinishJob) and "step 2 may yet be published" in finish.reason


def test_a_failure_to_publish_is_the_outcome_where_nobody_tried_before() -> None:
    script = trained()
    changed(script)
    for worker in "abc":
        script.tell(ShardsWritten, worker, 1, 2, ({"path": "x"},))
    script.tell(CheckpointFailed, 2, "the store is down")
    assert script.state.uploads.unsettled_step == 0


def test_a_checkpoint_is_begun_by_who_can_hear_it() -> None:
    script = Script(replace(POLICY, checkpoint_every_s=10))
    script.run(a="n1", b="n1", c="n2")
    script.train(1)
    changed(script)
    assert script.fire("checkpoint") == [StartTimer("checkpoint", 1, 2)]
    returned(script, "a", "b", "c")
    assert TakeCheckpoint("a") in script.fire("checkpoint")
