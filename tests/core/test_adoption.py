"""Another controller has the job: who is waited for, what is said again, what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Keeper, Member, Tier
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
    UseKeeper,
    WantWorkers,
)
from elastic_ft.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CollectiveFailed,
    ControllerChanged,
    KeeperHolds,
    KeeperLost,
    KeeperReturned,
    ResizeRequested,
    ShardsWritten,
    StopRequested,
    WorkerDone,
    WorkerLost,
    WorkerReturned,
)
from elastic_ft.core.hangs import Progress
from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import Adoption
from elastic_ft.core.state import State
from elastic_ft.core.table import Table
from tests.core.script import Script, assignment_in, keeper_on

POLICY = Policy(min_workers=1, max_workers=3, strategy="fsdp")
CHANGED = [WantWorkers(3, "the controller has changed"), StartTimer("return 2", 0, 2)]


def trained(*, keepers: bool = False, policy: Policy = POLICY) -> Script:
    """Three workers, one of them on a node of its own, that have committed two steps."""
    script = Script(policy)
    if keepers:
        script.keeper("n1")
        script.keeper("n2")
    script.run(a="n1", b="n1", c="n2")
    script.train(1, 2)
    return script


def changed(script: Script) -> list[object]:
    return list(script.tell(ControllerChanged, 2, "on n9"))


def returned(script: Script, *workers: str, newest: int | None = None) -> list[object]:
    newest = script.state.generation if newest is None else newest
    return [c for w in workers for c in script.tell(WorkerReturned, w, newest)]


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
        "nobody of n1, n2 has called controller 2, and committed steps may be lost with them: they "
        "have 59 s more"
    ]
    returned(script, "a", "b")
    script.tell(KeeperReturned, keeper_on("n1"))
    late = script.fire("return 2", 0)  # n1 has copies of all
    assert KillWorker("c", "it has not called the new controller within 2 s") in late
    assert script.state.committed == 2


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_who_never_calls_is_given_up_once_it_no_longer_looks(strategy: Strategy) -> None:
    script = trained(keepers=True, policy=replace(POLICY, strategy=strategy))
    changed(script)
    if strategy == "ddp":  # all of its state is with each
        returned(script, "c")
    else:
        script.now_s += POLICY.controller_timeout_s
    assert next(c.worker for c in script.fire("return 2", 0) if isinstance(c, KillWorker)) == "a"


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
    fruitless, losses = script.state.fruitless, script.state.losses
    (_, pause, _, _) = changed(script)
    assert isinstance(pause, PauseWorkers)
    assert (pause.generation, pause.workers, pause.abort) == (3, ("a", "b"), True)
    again = returned(script, "a", "b")
    assert [c.workers for c in again if isinstance(c, PauseWorkers)] == [("a",), ("b",)]
    script.paused("a", *script.copies("a", 2))
    assert assignment_in(script.paused("b", *script.copies("b", 2))).source.step == 2
    assert (script.state.fruitless, script.state.losses) == (fruitless, losses)


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


def test_timers_of_who_was_to_answer_begin_anew_with_the_controller() -> None:
    script = trained()
    script.tell(WorkerLost, "c", "killed")
    script.now_s += 60  # nobody was in charge for so long
    changed(script)
    assert script.fire("pause") == [StartTimer("pause", 2, 9)]
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


def test_keepers_are_named_to_their_workers_again() -> None:
    script = trained(keepers=True)
    changed(script)
    assert returned(script, "c") == [UseKeeper("c", keeper_on("n2"))]


def test_a_keeper_that_returns_has_what_it_had() -> None:
    script = trained(keepers=True)
    held = script.holding(2, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (held,))
    script.tell(WorkerLost, "c", "killed")
    changed(script)
    assert script.tell(KeeperReturned, keeper_on("n2")) == []
    assert script.state.left.shards == {("n2", "c"): (held,)}
    returned(script, "a", "b")
    script.fire("return 2", 0)
    assert list(script.state.keepers) == ["n2"]  # the other one's has not


def test_a_keeper_whose_line_alone_ended_is_used_again() -> None:
    """By the same controller. Where its end was not heard yet, it was never gone."""
    script = trained(keepers=True)
    assert script.tell(KeeperReturned, keeper_on("n2")) == []
    script.tell(KeeperLost, "n2")
    assert script.tell(KeeperReturned, keeper_on("n2")) == [UseKeeper("c", keeper_on("n2"))]
    assert list(script.state.keepers) == ["n1", "n2"]


def test_another_keeper_of_that_node_is_a_new_one() -> None:
    script = trained(keepers=True)
    changed(script)
    script.keeper("n1")
    assert script.state.adoption is not None
    assert list(script.state.adoption.keepers) == ["n2"]


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


def test_who_uses_its_keeper_again_leaves_more_there() -> None:
    """Its line to the keeper had ended: that told what it left, and is told again to be used."""
    script = trained(keepers=True)
    first = script.holding(1, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (first,))
    changed(script)
    assert returned(script, "c", "a", "b")[0] == UseKeeper("c", keeper_on("n2"))
    last = script.holding(2, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (last,))
    script.tell(KeeperHolds, "n2", "c", (first,))  # late, and told before
    script.tell(WorkerLost, "c", "crashed")
    assert script.state.left.shards == {("n2", "c"): (last,)}


def test_what_was_dropped_is_not_taken_for_news() -> None:
    script = trained(keepers=True)
    old = script.holding(1, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (old,))
    script.train(3)
    assert not script.state.left.shards
    assert script.tell(KeeperHolds, "n2", "c", (old,)) == []
    assert not script.state.left.shards


def test_a_keeper_that_calls_late_is_waited_for() -> None:
    """It was given up, and so were its workers: what it has of them is the newest that there is."""
    script = trained(keepers=True)
    changed(script)
    returned(script, "a", "b")
    script.tell(KeeperReturned, keeper_on("n1"))
    script.fire("return 2", 0)
    assert list(script.state.keepers) == ["n1"] and "c" not in script.state.ready
    script.tell(KeeperReturned, keeper_on("n2"))
    assert list(script.state.left.awaited) == [("n2", "c")]
    held = script.holding(2, 2, Tier.KEEPER)
    assert script.tell(KeeperHolds, "n2", "c", (held,)) == []
    assert script.state.left.shards == {("n2", "c"): (held,)}


def test_a_checkpoint_is_begun_by_who_can_hear_it() -> None:
    script = Script(replace(POLICY, checkpoint_every_s=10))
    script.run(a="n1", b="n1", c="n2")
    script.train(1)
    changed(script)
    assert script.fire("checkpoint") == [StartTimer("checkpoint", 1, 2)]
    returned(script, "a", "b", "c")
    assert TakeCheckpoint("a") in script.fire("checkpoint")


def test_who_has_still_to_call_is_not_taken_for_hung() -> None:
    """Those of a stopped controller hear of the next one by the silence alone."""
    member = Member("w0", "n0", "host", 1)
    keeper = Keeper("n0", ("host", 1))
    waiting = Adoption(2, 0.0, Table({"w0": None}), Table({"n0": None}))
    state = State(phase="running", ready=Table({"w0": member}), keepers={"n0": keeper})
    progress = Progress(60.0, 1.0)
    for adoption, hung in ((waiting, False), (None, True)):
        state = replace(state, adoption=adoption)
        for now_s in (0.0, 10.0) if adoption else (12.0,):
            assert bool(progress.judge(state, now_s).hung) == hung, now_s
            assert bool(progress.silent_keepers(state, now_s)) == hung, now_s
