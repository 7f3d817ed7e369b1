"""What ended workers left with their nodes' keepers: when it is used, awaited, forgotten."""

from __future__ import annotations

from elastic_ft.core.assignment import Holding, Source, Tier
from elastic_ft.core.commands import (
    DropKept,
    PauseWorkers,
    RecordStep,
    RollBack,
    StartTimer,
    UseKeeper,
)
from elastic_ft.core.events import (
    CollectiveFailed,
    ControllerChanged,
    KeeperHolds,
    KeeperLost,
    NodeLost,
    StepApplied,
    StepHeld,
    Unkept,
    WorkerLost,
)
from elastic_ft.core.policy import Policy
from tests.core.left import (
    REF,
    S0,
    S1,
    S2,
    SHARD_OF,
    THREE,
    kept,
    kept_here,
    reading_from_n2,
    survivors_pause,
    tells,
)
from tests.core.script import Script, assignment_in, keeper_on

# ----------------------------------------------------------------------------- who uses which


def test_workers_use_the_keeper_of_their_node_whichever_comes_first() -> None:
    script = Script(Policy(1, 3))
    assert script.keeper("n1") == []
    assert script.ready("a", "n1")[0] == UseKeeper("a", keeper_on("n1"))
    assert UseKeeper not in [type(c) for c in script.ready("b", "n2")]
    assert script.keeper("n2") == [UseKeeper("b", keeper_on("n2"))]
    assert script.keeper("n1") == [UseKeeper("a", keeper_on("n1"))]  # it was started again
    assert script.journalled("keeper_ready")


def test_an_assignment_names_the_keepers_that_are_alive() -> None:
    script = kept_here()
    assert script.assignment.keepers == (keeper_on("n1"), keeper_on("n2"), keeper_on("n3"))
    script.tell(KeeperLost, "n2")
    assert script.journalled("keeper_lost")
    assert script.tell(KeeperLost, "n2") == []
    script.tell(CollectiveFailed, "a", 1, 0, "reset")
    survivors_pause(script, 0, "a", "b", "c")
    assert script.assignment.keepers == (keeper_on("n1"), keeper_on("n3"))


def test_a_single_worker_commits_what_its_keeper_holds() -> None:
    script = Script(Policy(1, 1))
    script.keeper("n1")
    script.run(a="n1")
    assert script.applied("a", 1) == []
    assert [c.step for c in script.train(1) if isinstance(c, RecordStep)] == [1]
    without = Script(Policy(1, 1)).run(a="n1")
    assert [c.step for c in without.applied("a", 1) if isinstance(c, RecordStep)] == [1]


def test_a_worker_without_a_keeper_holds_up_no_commit() -> None:
    """Replicas survive each other. The first one's snapshot is for when all of them end."""
    script = Script(Policy(1, 2))
    script.keeper("n1")
    script.run(a="n1", b="n2").train(1)
    for worker in "ab":
        script.applied(worker, 2)
    assert script.state.committed == 1
    commands = script.tell(Unkept, "a", "the line has ended")
    assert [c.step for c in commands if isinstance(c, RecordStep)] == [2]
    assert script.journalled("snapshots_unkept") == ["the line has ended"]
    assert [c.step for c in script.train(3, held=False) if isinstance(c, RecordStep)] == [3]
    assert UseKeeper("a", keeper_on("n1")) in script.keeper("n1")  # another one
    script.tell(StepHeld, "a", 1, 4)
    assert [c.step for c in script.train(4, held=False) if isinstance(c, RecordStep)] == [4]
    assert [c for c in script.train(5, held=False) if isinstance(c, RecordStep)] == []
    assert [c.step for c in script.train(5) if isinstance(c, RecordStep)] == [5]


def test_what_was_said_before_is_no_keepers_copy() -> None:
    script = Script(Policy(1, 1))
    script.keeper("n1")
    script.run(a="n1")
    for kind, *more in ((StepHeld, 1, 1), (Unkept, "no room"), (StepHeld, 1, 1)):
        script.tell(kind, "a", *more)
    assert script.state.unkept == {"a"}
    assert [c.step for c in script.applied("a", 1) if isinstance(c, RecordStep)] == [1]


def test_where_state_is_cut_own_memory_and_a_buddys_are_enough() -> None:
    script = kept_here(copies=2)
    script.tell(Unkept, "a", "the line has ended")
    assert [c for c in script.train(1, held=False) if isinstance(c, RecordStep)] == []
    assert [c.step for c in script.train(1) if isinstance(c, RecordStep)] == [1]


# ------------------------------------------------------------------------------- what is used


def test_what_the_dead_left_is_a_source_where_nobody_else_has_it() -> None:
    script = kept_here()
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 1, 2)
    assignment = assignment_in(survivors_pause(script, 2, "a", "c"))
    assert (assignment.source.step, assignment.source.tier) == (2, Tier.KEEPER)
    assert assignment.source.holders[S1] == (("keeper:n2/b", Tier.KEEPER),)
    assert [m.worker for m in assignment.members] == ["a", "c"]
    assert assignment.donors == ()
    script.resume()
    (recovery,) = script.state.recoveries
    assert (recovery.source, recovery.steps_lost) == ("keeper", 0)


def test_a_step_that_only_the_dead_had_is_recorded_as_their_keepers_know_it() -> None:
    """What they said of it themselves came after their loss was known: it is not heard (I1)."""
    script = kept_here()
    script.train(1)
    metrics = {"loss": 0.5, "sample_ids": [1, 2]}
    lines = tuple(RecordStep(step, 1, 3, "fsdp3", metrics) for step in (1, 2, 3))
    for worker, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        script.tell(WorkerLost, worker, "killed")
        held = (kept(2, SHARD_OF[worker]),)
        script.tell(KeeperHolds, node, worker, held, lines[:2])
        script.tell(StepApplied, worker, 1, 2, metrics)
    assert assignment_in(script.ready("d", "n1")).source.step == 2
    script.resume()
    (recorded,) = [c for c in script.train(2) if isinstance(c, RecordStep)]
    assert recorded == lines[1]


def test_what_a_cut_off_worker_trained_again_is_not_recorded() -> None:
    script = kept_here(copies=2)
    script.train(1)
    script.tell(WorkerLost, "b", "silent")
    assert assignment_in(survivors_pause(script, 1, "a", "c")).source.step == 1
    script.resume()
    stale = (RecordStep(1, 1, 3, "fsdp3", {"loss": 1.0}), RecordStep(2, 1, 3, "fsdp3", {"loss": 9}))
    held = tuple(kept(step, S1) for step in (1, 2))
    script.tell(KeeperHolds, "n2", "b", held, stale)
    for worker in "ac":  # they have trained step 2 again, and nobody has heard of it
        script.tell(CollectiveFailed, worker, 2, 2, "reset")
    survivors_pause(script, 2, "a", "c")
    assert script.state.pending[2].metrics == {}
    assert script.state.pending[2].generation == 2


def test_the_keeper_may_tell_before_the_loss_is_known() -> None:
    script = kept_here()
    script.train(1, 2)
    assert tells(script, "b", "n2", 2) == []
    script.tell(WorkerLost, "b", "killed")
    assert not script.state.left.awaited
    assert assignment_in(survivors_pause(script, 2, "a", "c")).source.step == 2


def test_the_memory_of_the_living_is_preferred_and_not_waited_beyond() -> None:
    script = kept_here(copies=2)
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    commands = survivors_pause(script, 2, "a", "c")  # c keeps b's copy
    assert assignment_in(commands).source.holders[S1] == (("c", Tier.PEER),)
    told = kept_here(copies=2)
    told.train(1, 2)
    told.tell(WorkerLost, "b", "killed")
    tells(told, "b", "n2", 2)
    assert (
        assignment_in(survivors_pause(told, 2, "a", "c")).source == assignment_in(commands).source
    )


def test_memory_left_behind_wins_over_a_checkpoint_of_the_same_step() -> None:
    script = kept_here(1, REF)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 10, generation=REF.generation)
    source = assignment_in(survivors_pause(script, 10, "a", "c")).source
    assert (source.step, source.tier) == (10, Tier.KEEPER)


def test_all_workers_of_a_world_may_be_dead() -> None:
    script = kept_here()
    script.train(1, 2)
    for worker, node in (("a", "n1"), ("b", "n2"), ("c", "n3")):
        script.tell(WorkerLost, worker, "killed")
        tells(script, worker, node, 1, 2)
    assert script.state.phase == "suspended"
    source = assignment_in(script.ready("d", "n1")).source
    assert source.step == 2
    assert source.holders == {
        S0: (("keeper:n1/a", Tier.KEEPER),),
        S1: (("keeper:n2/b", Tier.KEEPER),),
        S2: (("keeper:n3/c", Tier.KEEPER),),
    }


# ---------------------------------------------------------------------------- what is awaited


def test_what_no_keeper_ever_tells_of_is_not_awaited_for_ever() -> None:
    """A worker that dies before it reaches its keeper is one of which no word comes."""
    script = kept_here(copies=2)
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 2, "a", "c")
    script.resume()
    assert ("n2", "b") in script.state.left.awaited
    script.train(3)
    assert not script.state.left.awaited, "what it had is older than what is committed"
    commands = script.tell(KeeperHolds, "n2", "b", (kept(2, S1),))
    assert commands == [DropKept("n2", "b")]


def waiting() -> Script:
    """b's shard of the committed steps is with its keeper alone, which has not told yet."""
    script = kept_here(1, REF)
    script.train(11, 12)
    script.tell(WorkerLost, "b", "killed")
    assert survivors_pause(script, 12, "a", "c") == [StartTimer("keeper", 2, 10)]
    assert script.journalled("awaiting_keeper") == [
        "b may have left a newer state than step 10 with a keeper: its word is awaited"
    ]
    return script


def test_committed_steps_are_not_given_up_before_the_keeper_has_told() -> None:
    script = waiting()
    commands = tells(script, "b", "n2", 11, 12)
    assert not [c for c in commands if isinstance(c, RollBack)]
    assert assignment_in(commands).source.step == 12
    assert script.fire("keeper") == []


def test_a_keeper_that_can_have_nothing_newer_is_not_waited_for() -> None:
    """c had no rank any more when steps 11 and 12 were trained."""
    script = Script(Policy(1, 4, multiple_of=2), REF)
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    script.run(a="n1", b="n2", c="n3", d="n4")
    script.tell(WorkerLost, "d", "killed")
    survivors_pause(script, 10, "a", "b", "c")
    script.resume()
    script.train(11, 12)
    for node in ("n1", "n2"):
        script.tell(NodeLost, node, "power")
    script.tell(WorkerLost, "c", "killed")
    assert ("n3", "c") in script.state.left.awaited
    script.ready("e", "n5")
    assert assignment_in(script.ready("f", "n5")).source.step == 10


def test_the_wait_ends_when_it_has_nothing_newer() -> None:
    commands = waiting().tell(KeeperHolds, "n2", "b", ())
    assert isinstance(commands[1], RollBack) and commands[1].step == 10
    assert assignment_in(commands).source.tier is Tier.CHECKPOINT


def test_the_wait_ends_by_its_deadline_and_what_comes_later_is_dropped() -> None:
    script = waiting()
    assert script.fire("keeper", 1) == []  # a timer of another generation
    commands = script.fire("keeper")
    assert isinstance(commands[0], RollBack)
    assert assignment_in(commands).source == Source(10, Tier.CHECKPOINT, url=REF.url)
    assert tells(script, "b", "n2", 12) == [DropKept("n2", "b")]
    assert script.state.left.shards == {}


def test_the_wait_begins_anew_with_the_next_controller() -> None:
    """Nobody was there for the keeper to tell; and as long as it looks for that one it can't."""
    script = waiting()
    script.now_s += 60
    script.tell(ControllerChanged, 2)
    assert script.fire("keeper") == [StartTimer("keeper", 2, 10)]


def test_the_wait_ends_with_the_keeper_or_the_node() -> None:
    for event, *args in ((KeeperLost, "n2"), (NodeLost, "n2", "power")):
        commands = waiting().tell(event, *args)
        assert isinstance(commands[0], RollBack), event
        assert assignment_in(commands).source.tier is Tier.CHECKPOINT


def test_a_keeper_lost_while_it_is_read_from_is_not_waited_for() -> None:
    """It may be stopped: who asks it would answer nobody else before the form timeout."""
    for event, *args in ((KeeperLost, "n2", "nothing heard"), (NodeLost, "n2", "power")):
        script = reading_from_n2()
        commands = script.tell(event, *args)
        (pause,) = [c for c in commands if isinstance(c, PauseWorkers)]
        assert (pause.generation, pause.abort, pause.workers) == (3, True, ("a", "c")), event
        script.paused("a", Holding(11, THREE, S0, Tier.LIVE))
        assert (
            assignment_in(script.paused("c", Holding(11, THREE, S2, Tier.LIVE))).source.step == 10
        )


def test_a_node_lost_with_a_member_and_what_is_read_opens_one_generation() -> None:
    script = Script(Policy(1, 3, strategy="fsdp", copies=1), REF)
    script.keeper("n2")
    script.run(a="n1", b="n2", c="n2").train(11)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11)
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.tier is Tier.KEEPER
    commands = script.tell(NodeLost, "n2", "power")
    assert [c.generation for c in commands if isinstance(c, PauseWorkers)] == [3]


def test_any_other_keeper_lost_while_forming_disturbs_nobody() -> None:
    script = reading_from_n2()
    assert script.tell(KeeperLost, "n3") == []
    assert script.state.phase == "forming"


def test_one_whose_node_has_a_longer_name_is_another_keeper() -> None:
    script = Script(Policy(1, 2, strategy="fsdp", copies=1), REF)
    script.keeper("n1")
    script.keeper("n12")
    script.run(a="n1", b="n12").train(11)
    script.tell(WorkerLost, "b", "killed")
    script.tell(KeeperHolds, "n12", "b", (script.holding(11, 1, Tier.KEEPER),))
    assert assignment_in(script.paused("a", script.live("a", 11))).source.tier is Tier.KEEPER
    assert script.tell(KeeperLost, "n1") == []
    assert script.state.phase == "forming"


def test_a_keeper_lost_once_it_has_been_read_from_disturbs_nobody() -> None:
    script = reading_from_n2()
    script.resume()
    assert script.tell(KeeperLost, "n2") == []
    assert script.state.phase == "running"


def test_why_a_keeper_is_lost_is_journalled() -> None:
    script = kept_here()
    script.tell(KeeperLost, "n2", "nothing heard for 10.2 s")
    script.tell(KeeperLost, "n3")
    what = "until there is another, its workers keep their snapshots themselves"
    assert script.journalled("keeper_lost") == [f"nothing heard for 10.2 s: {what}", what]


def test_a_lost_node_takes_what_its_keeper_had() -> None:
    script = kept_here(1, REF)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11)
    script.tell(NodeLost, "n2", "power")
    assert script.state.left.shards == {}
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.step == 10


def test_a_node_lost_at_once_leaves_nothing_to_wait_for() -> None:
    script = kept_here(1, REF)
    script.train(11)
    script.tell(NodeLost, "n2", "power")
    assert not script.state.left.awaited
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.step == 10


def test_a_keeper_that_starts_again_has_nothing() -> None:
    script = kept_here(1, REF)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11)
    script.keeper("n2")
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.step == 10


def test_what_the_keeper_before_had_told_is_not_the_word_of_this_one() -> None:
    script = kept_here()
    script.train(1, 2)
    tells(script, "b", "n2", 2)
    script.keeper("n2")
    script.train(3)
    script.tell(WorkerLost, "b", "killed")
    assert survivors_pause(script, 3, "a", "c") == [StartTimer("keeper", 2, 10)]
    assert assignment_in(tells(script, "b", "n2", 3)).source.step == 3


def test_a_world_that_waits_for_workers_waits_for_keepers_too() -> None:
    script = kept_here(1, REF, min_workers=3)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 11, "a", "c")
    assert script.state.phase == "suspended"
    assert script.ready("d", "n2")[1:] == [StartTimer("keeper", 3, 10)]
    assert assignment_in(tells(script, "b", "n2", 11)).source.step == 11
