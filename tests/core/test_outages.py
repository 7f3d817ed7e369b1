"""A store that can't be read is no damage: nothing is struck, the same source is tried again."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import CheckpointRef, Holding, Source, Tier
from elastic_ft.core.commands import (
    Command,
    FinishJob,
    PauseWorkers,
    ReleaseWorker,
    RollBack,
    StartTimer,
)
from elastic_ft.core.events import UNREACHABLE, SourceRefused, StopRequested, WorkerLost
from elastic_ft.core.policy import Policy
from tests.core.script import Script, assignment_in

REFS = (CheckpointRef(120, "s3://b/120"), CheckpointRef(80, "s3://b/80"))
NEWEST = Source(120, Tier.CHECKPOINT, url="s3://b/120")
LAST = "last good checkpoint: step 120, s3://b/120"
WHY = "cannot read s3://b/120: busy: 503"


def restarted(*workers: str, **policy: int | float | str) -> Script:
    """All workers are new: they read the newest checkpoint."""
    workers = workers or ("a", "b")
    least = int(policy.pop("min_workers", len(workers)))
    script = Script(Policy(least, len(workers), **policy), *REFS)  # type: ignore[arg-type]
    for number, worker in enumerate(workers):
        script.ready(worker, f"n{number}")
    assert script.assignment.source == NEWEST
    return script


def unread(script: Script, worker: str = "a", *alone: str) -> list[Command]:
    """``worker`` says so, and everybody comes to its safe point."""
    commands = refuse(script, worker, *alone)
    for name in script.ranks:
        if script.state.phase == "pausing":
            commands += script.paused(name)
    return commands


def refuse(script: Script, worker: str, *alone: str) -> list[Command]:
    generation, url = script.assignment.generation, script.assignment.source.url
    return script.tell(
        SourceRefused, worker, generation, url, WHY, kind=UNREACHABLE, unread_by=alone
    )


def again(script: Script) -> list[Command]:
    return script.fire("reread", 0)


def test_an_unreadable_store_strikes_nothing_and_is_read_again() -> None:
    script = restarted()
    commands = unread(script)
    assert commands == [
        StartTimer("reread", 0, 1.0),
        PauseWorkers(2, ("a", "b"), True, f"s3://b/120: {WHY}"),
        StartTimer("pause", 2, 10),
    ]
    assert script.state.phase == "suspended"
    (said,) = script.journalled("suspended")
    assert said == (f"the store can't be read: {WHY}: tried again for up to 1800 s; {LAST}")
    assert script.state.checkpoints == REFS and not script.state.refused
    assert assignment_in(again(script)).source == NEWEST
    script.resume()
    assert script.state.phase == "running" and script.state.committed == 120
    assert script.state.outage is None


def test_pauses_between_the_tries_grow_and_cost_no_generation_of_those_allowed() -> None:
    script = restarted(max_generations_without_progress=2)
    pauses = []
    for _ in range(9):
        pauses += [c.after_s for c in unread(script) if isinstance(c, StartTimer)][:1]
        assert script.state.phase == "suspended"
        again(script)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert script.state.blame.fruitless == 0
    assert len(script.journalled("suspended")) == 1
    assert len(script.journalled("source_unreadable")) == 9


def test_a_store_that_stays_away_ends_the_job_as_suspended_with_its_checkpoint() -> None:
    script = restarted(suspend_timeout_s=60)
    while script.state.phase != "ended":
        assert script.now_s < 400
        for command in unread(script):
            if isinstance(command, StartTimer) and command.timer == "reread":
                script.now_s += command.after_s
                again(script)
    assert script.status == "suspended"
    reason = f"the store has been unreadable for 64 s: {WHY}; {LAST}"
    assert script.journalled("finished") == [reason]


def test_all_ranks_say_the_same_and_it_counts_once() -> None:
    script = restarted()
    refuse(script, "a")
    assert refuse(script, "b") == []
    assert script.state.outage is not None and script.state.outage.tries == 1


def test_a_refusal_that_comes_after_the_form_timeout_counts() -> None:
    """Else the same source is chosen again and again, until no generation is left."""
    script = restarted(max_generations_without_progress=2)
    for _ in range(5):
        script.fire("form")
        assert script.state.phase == "pausing"
        refuse(script, "a")
        for name in "ab":
            script.paused(name)
        assert script.state.phase == "suspended"
        again(script)
    assert script.state.phase == "forming" and script.state.checkpoints == REFS


def test_a_late_refusal_of_damage_counts_too() -> None:
    script = restarted()
    script.fire("form")
    assert script.tell(SourceRefused, "a", 1, "s3://b/120", "digest differs") == []
    assert script.journalled("checkpoint_refused") == ["digest differs"]
    script.paused("a")
    commands = script.paused("b")
    assert isinstance(commands[0], RollBack)
    assert assignment_in(commands).source.step == 80


def test_all_that_is_found_damaged_at_a_time_is_struck_at_once() -> None:
    """Each worker tells of what it has found; the first one opens the next generation."""
    script = Script(Policy(1, 3, strategy="fsdp", copies=2)).run(a="n1", b="n2", c="n3")
    script.train(1)
    script.tell(WorkerLost, "c", "killed")
    for name in "ab":
        script.paused(name, *script.copies(name, 1))
    assert script.state.phase == "forming"
    generation = script.state.generation
    for name in "ab":
        script.tell(SourceRefused, name, generation, name, "digest differs", f"pp0.s{name}.tp0")
    assert script.journalled("source_refused") == ["digest differs"] * 2
    assert {holder for holder, *_ in script.state.refused} == {"a", "b"}
    assert script.state.phase == "pausing" and script.state.generation == generation + 1


def test_a_worker_that_alone_can_not_read_is_left_out() -> None:
    script = restarted("a", "b", "c", min_workers=2)
    for _ in range(2):  # once may be chance
        unread(script, "a", "b")
        assert script.state.phase == "suspended"
        again(script)
    commands = unread(script, "a", "b")
    assert not [c for c in commands if isinstance(c, StartTimer) and c.timer == "reread"]
    assert script.ranks == ("a", "c") and script.assignment.source == NEWEST
    reason = f"it can't read the store, and others can: {WHY}"
    assert script.journalled("worker_left_out") == [reason]
    assert ReleaseWorker("b", reason) in script.resume()
    assert script.state.committed == 120


def test_a_worker_that_can_not_be_spared_is_waited_for() -> None:
    script = restarted("a", "b")
    for _ in range(5):
        unread(script, "a", "b")
        assert script.state.phase == "suspended"
        again(script)
    assert script.ranks == ("a", "b")


def test_memory_needs_no_store() -> None:
    """What a keeper tells meanwhile is gone on from, once the store would be tried again."""
    script = Script(Policy(1, 2, strategy="fsdp", copies=1), CheckpointRef(10, "s3://b/10"))
    script.run(a="n1", b="n2").tell(WorkerLost, "b", "killed")
    held = script.live("a", 10)
    script.paused("a", held)
    assert script.assignment.source.holders["pp0.s1.tp0"] == (("s3://b/10", Tier.CHECKPOINT),)
    refuse(script, "a")
    whole = (held, Holding(10, held.space, "pp0.s1.tp0", Tier.PEER))
    assert assignment_in(script.paused("a", *whole)).source.url == ""


def test_frozen_weights_that_can_not_be_read_are_waited_for_though_all_is_in_memory() -> None:
    """With the pauses of a checkpoint: generation after generation formed at once."""
    script = Script(Policy(1, 2, max_generations_without_progress=2), REFS[1])
    script.run(a="n1", b="n2").train(81)
    script.tell(WorkerLost, "b", "killed")
    held = script.live("a", 81)
    script.paused("a", held)
    pauses = []
    for _ in range(6):
        assert script.assignment.source.tier is Tier.LIVE and script.assignment.source.url == ""
        commands = refuse(script, "a") + script.paused("a", held)
        pauses += [c.after_s for c in commands if isinstance(c, StartTimer)][:1]
        assert script.state.phase == "suspended"
        again(script)
    assert pauses == [1, 2, 4, 8, 16, 30]
    assert len(script.journalled("suspended")) == 1
    script.resume()
    assert script.state.phase == "running" and script.state.committed == 81


def test_a_folder_that_step_0_is_made_of_is_waited_for() -> None:
    script = Script(Policy(2, 2, max_user_failures=0))
    for worker in "ab":
        script.ready(worker, f"n{worker}")
    initial = Source(0, Tier.INITIAL)
    for pause_s in (1, 2, 4):
        assert script.assignment.source == initial
        assert unread(script)[0] == StartTimer("reread", 0, pause_s)
        assert script.state.phase == "suspended"
        again(script)
    script.resume()
    assert script.state.phase == "running" and script.state.committed == 0


def test_the_job_can_be_stopped_while_it_waits_for_the_store() -> None:
    script = restarted()
    unread(script)
    finish = script.tell(StopRequested, "SIGINT")[-1]
    assert finish == FinishJob("stopped", f"SIGINT; {LAST}")


def test_workers_that_come_and_go_meanwhile_do_not_hurry_the_store() -> None:
    script = restarted("a", "b", "c", min_workers=2)
    unread(script)
    script.tell(WorkerLost, "c", "killed")
    assert [c for c in script.ready("d", "n4") if not isinstance(c, StartTimer)] == []
    assert script.state.phase == "suspended"
    assert {m.worker for m in assignment_in(again(script)).members} == {*"abd"}


@pytest.mark.parametrize("held", ["a", "nobody"])
def test_too_few_workers_after_the_outage_wait_for_more(held: str) -> None:
    script = restarted()
    unread(script)
    for worker in "ab":
        if worker != held:
            script.tell(WorkerLost, worker, "killed")
    assert StartTimer("suspend", script.state.generation + 1, 1800) in again(script)
    assert script.state.phase == "suspended"
