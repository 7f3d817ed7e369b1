"""What ended workers left with their nodes' keepers: when it is used, awaited, forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.core.assignment import CheckpointRef, Holding, Source, Tier
from elastic_ft.core.commands import (
    Command,
    DropKept,
    PauseWorkers,
    RecordStep,
    ReleaseWorker,
    RollBack,
    StartTimer,
    UseKeeper,
)
from elastic_ft.core.events import (
    UNREACHABLE,
    CollectiveFailed,
    ControllerChanged,
    KeeperHolds,
    KeeperLost,
    KeeperReturned,
    NodeDraining,
    NodeLost,
    Resumed,
    SourceRefused,
    StepApplied,
    StepHeld,
    Unkept,
    WorkerLost,
    WorkerReturned,
)
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.policy import Policy
from tests.core.script import Script, assignment_in, keeper_on

S0, S1, S2 = "pp0.s0.tp0", "pp0.s1.tp0", "pp0.s2.tp0"
SHARD_OF = {"a": S0, "b": S1, "c": S2}
THREE, TWO = "pp1.s3.tp1", "pp1.s2.tp1"
REF = CheckpointRef(10, "s3://b/10")


def kept_here(copies: int = 1, *refs: CheckpointRef, min_workers: int = 1) -> Script:
    """a, b and c train in three shards, one to a node, each node with its keeper."""
    script = Script(Policy(min_workers, 3, strategy="fsdp", copies=copies), *refs)
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    return script.run(a="n1", b="n2", c="n3")


def tells(
    script: Script, worker: str, node: str, *steps: int, generation: int = 1
) -> list[Command]:
    """The node's keeper has the worker's own shard of these steps, computed by ``generation``."""
    held = (kept(step, SHARD_OF[worker], generation) for step in steps)
    return script.tell(KeeperHolds, node, worker, tuple(held))


def kept(step: int, shard: str, generation: int = 1, space: str = THREE) -> Holding:
    return Holding(step, space, shard, Tier.KEEPER, generation)


def survivors_pause(script: Script, number: int, *workers: str) -> list[Command]:
    """They report their live state and their copies of ``number``."""
    commands: list[Command] = []
    for worker in workers:
        held = (script.live(worker, number), *script.copies(worker, number))
        commands += script.paused(worker, *held)
    return commands


def words_of_all(count: int) -> Iterator[None]:
    """All workers are killed, others take their places; each keeper tells what it has."""
    script = Script(Policy(count, count, strategy="fsdp", copies=2))
    for number in range(count):
        script.keeper(f"n{number}")
    script.run(**{f"w{number}": f"n{number}" for number in range(count)})
    script.train(1)
    left = {w: (script.live(w, 1), *script.copies(w, 1)) for w in script.ranks}
    for worker in left:
        script.tell(WorkerLost, worker, "killed")
    for number in range(count):
        script.ready(f"x{number}", f"n{number}")
    yield
    for worker, some in left.items():
        held = tuple(replace(one, tier=Tier.KEEPER) for one in some)
        script.tell(KeeperHolds, f"n{worker[1:]}", worker, held)
    assert script.assignment.source.step == 1


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
    assert script.journalled("awaiting_keeper") == ["what b left may be newer than step 10"]
    return script


def test_committed_steps_are_not_given_up_before_the_keeper_has_told() -> None:
    script = waiting()
    commands = tells(script, "b", "n2", 11, 12)
    assert not [c for c in commands if isinstance(c, RollBack)]
    assert assignment_in(commands).source.step == 12
    assert script.fire("keeper") == []


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


def test_the_wait_ends_with_the_keeper_or_the_node() -> None:
    for event, *args in ((KeeperLost, "n2"), (NodeLost, "n2", "power")):
        commands = waiting().tell(event, *args)
        assert isinstance(commands[0], RollBack), event
        assert assignment_in(commands).source.tier is Tier.CHECKPOINT


def reading_from_n2() -> Script:
    """Generation 2 forms, and gets b's shard of step 11 from its keeper."""
    script = kept_here(1, REF)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11)
    assert assignment_in(survivors_pause(script, 11, "a", "c")).source.tier is Tier.KEEPER
    return script


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


def test_any_other_keeper_lost_while_forming_disturbs_nobody() -> None:
    script = reading_from_n2()
    assert script.tell(KeeperLost, "n3") == []
    assert script.state.phase == "forming"


def test_why_a_keeper_is_lost_is_journalled() -> None:
    script = kept_here()
    script.tell(KeeperLost, "n2", "nothing heard for 10.2 s")
    script.tell(KeeperLost, "n3")
    what = "its workers' snapshots are their own now"
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


def test_a_world_that_waits_for_workers_waits_for_keepers_too() -> None:
    script = kept_here(1, REF, min_workers=3)
    script.train(11)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 11, "a", "c")
    assert script.state.phase == "suspended"
    assert script.ready("d", "n2")[1:] == [StartTimer("keeper", 3, 10)]
    assert assignment_in(tells(script, "b", "n2", 11)).source.step == 11


# --------------------------------------------------------------------------- what is forgotten


def test_told_twice_is_told_once() -> None:
    script = kept_here()
    script.train(1, 2)
    tells(script, "b", "n2", 2)
    before = script.state
    assert tells(script, "b", "n2", 2) == []
    assert script.state == before
    script.tell(WorkerLost, "b", "killed")
    before = script.state
    assert tells(script, "b", "n2", 2) == []
    assert script.state == before


def rolled_back_past_a_report() -> Script:
    """b's keeper has step 12, but c's shard of it is gone for good: they go on from 10."""
    script = kept_here(1, REF)
    script.train(11, 12)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11, 12)
    script.tell(NodeLost, "n3", "power")
    commands = survivors_pause(script, 12, "a")
    assert DropKept("n2", "b") in commands  # two histories have a step 12 from now on
    assert assignment_in(commands).source.step == 10
    return script


def test_later_steps_than_the_restored_one_are_forgotten() -> None:
    script = rolled_back_past_a_report()
    assert script.state.left.shards == {}
    assert tells(script, "b", "n2", 12) == [DropKept("n2", "b")]  # a late repetition
    assert script.state.left.shards == {}


def test_what_keepers_said_of_a_step_is_not_recorded_once_it_was_trained_again() -> None:
    """b's keeper knows the loss of step 12. The job goes back to 10, and 12 has another loss."""
    script = kept_here(1, REF)
    script.train(11)
    script.applied("b", 12)
    script.tell(WorkerLost, "b", "killed")
    line = RecordStep(12, 1, 3, "fsdp3", {"loss": 9.0})
    script.tell(KeeperHolds, "n2", "b", (kept(11, S1), kept(12, S1)), (line,))
    script.tell(NodeLost, "n3", "power")
    assert assignment_in(survivors_pause(script, 12, "a")).source.step == 10
    script.resume()
    script.train(11)
    script.tell(CollectiveFailed, "a", 2, 12, "reset")  # 12 is applied, and not heard of
    source = assignment_in(survivors_pause(script, 12, "a")).source
    assert (source.step, source.generation) == (12, 2)
    assert (script.state.pending[12].generation, script.state.pending[12].metrics) == (2, {})


def test_two_left_states_of_one_step_are_not_put_together() -> None:
    """b left step 11 of generation 1, a left that of generation 2, which began from 10 again."""
    script = rolled_back_past_a_report()
    script.resume()
    script.train(11)
    script.tell(WorkerLost, "a", "killed")
    whole = Holding(11, "pp1.s1.tp1", S0, Tier.KEEPER, 2)
    script.tell(KeeperHolds, "n1", "a", (kept(11, S0), kept(11, S2), whole))
    script.tell(KeeperHolds, "n2", "b", (kept(11, S1),))  # said again, as if it had been lost
    source = assignment_in(script.ready("d", "n1")).source
    assert (source.generation, source.space) == (2, "pp1.s1.tp1")


def test_of_a_late_report_the_steps_that_were_not_trained_again_count() -> None:
    """The living sufficed. If now one of them dies, the dead one's copy is as good as ever."""
    script = kept_here(copies=2)
    script.train(1, 2)
    script.applied("a", 3)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 2, "a", "c")
    assert tells(script, "b", "n2", 2, 3) == []
    script.tell(WorkerLost, "c", "killed")  # it alone had b's shard
    script.tell(KeeperLost, "n3")
    own, peers = Holding(2, THREE, S0, Tier.LIVE, 1), Holding(2, THREE, S2, Tier.PEER, 1)
    source = assignment_in(script.paused("a", own, peers)).source
    assert source.step == 2
    assert source.holders[S1] == (("keeper:n2/b", Tier.KEEPER),)


def test_what_a_keeper_told_of_one_that_lives_is_not_its_last_word() -> None:
    """The line of b's worker to its keeper broke while no controller was there; the next one has
    it use the keeper again, which then has what nobody else does."""
    script = kept_here()
    script.train(1, 2)
    script.tell(ControllerChanged, 2)
    for worker in "abc":
        script.tell(WorkerReturned, worker, 1)
    tells(script, "b", "n2", 2)
    script.train(3)
    script.tell(WorkerLost, "b", "killed")
    assert survivors_pause(script, 3, "a", "c") == [StartTimer("keeper", 2, 10)]
    assert assignment_in(tells(script, "b", "n2", 3)).source.step == 3


def test_a_generation_that_nobody_lived_to_tell_of_is_told_by_what_it_made() -> None:
    """Its steps were recorded, of a generation that never formed as far as the journal knew."""
    script = Script(Policy(1, 2))
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    script.run(a="n1", b="n2").train(1, 2)
    script.tell(CollectiveFailed, "a", 1, 2, "reset")
    survivors_pause(script, 2, "a", "b")
    script.tell(Resumed, "a", 2, 2)
    script.ready("c", "n3")
    for worker in "ab":
        script.tell(WorkerLost, worker, "killed")
    assert len(script.journalled("generation_formed")) == 1
    script.paused("c")
    record = (RecordStep(3, 2, 2, "ddp2", {"loss": 0.5}),)
    left = (kept(3, S0, 2, "pp1.s1.tp1"),)
    commands = script.tell(KeeperHolds, "n1", "a", left, record)
    assert (assignment_in(commands).source.step, len(script.journalled("generation_formed"))) == (
        3,
        2,
    )


def test_a_keeper_that_is_late_after_a_change_and_has_what_counts_is_waited_for() -> None:
    """Two seconds late, it cost two committed steps."""
    script = kept_here()
    script.train(1, 2)
    script.tell(ControllerChanged, 2)
    script.tell(WorkerLost, "b", "killed")
    for worker in "ac":
        script.tell(WorkerReturned, worker, 1)
    script.tell(KeeperReturned, keeper_on("n1"))
    survivors_pause(script, 2, "a", "c")
    assert script.journalled("awaiting_keeper")
    commands = script.fire("return 2", 0)
    assert RollBack not in [type(command) for command in commands]
    assert script.state.keepers.keys() == {"n1", "n2"}, "n3 is late, and nobody waits for it"
    assert assignment_in(tells(script, "b", "n2", 2)).source.step == 2


def test_a_keeper_that_is_late_after_a_change_and_is_read_from_is_waited_for() -> None:
    """A fifth of a second late, it cost five committed steps (simulator, adopted(9612, "ddp"))."""
    script = Script(Policy(1, 1))
    script.keeper("n1")
    script.keeper("n2")
    script.run(a="n1").train(1, 2)
    script.tell(WorkerLost, "a", "killed")
    script.tell(KeeperHolds, "n1", "a", (kept(2, S0, space="pp1.s1.tp1"),))
    script.tell(ControllerChanged, 2)
    assert assignment_in(script.ready("c", "n1")).source.step == 2
    assert PauseWorkers not in [type(command) for command in script.fire("return 2", 0)]
    assert script.state.keepers.keys() == {"n1"}, "n2 has nothing"
    assert script.state.phase == "forming"


def test_a_late_report_of_void_steps_alone_is_dropped_once_they_are_trained_again() -> None:
    script = kept_here(copies=2)
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 2, "a", "c")
    assert tells(script, "b", "n2", 3) == [], "generation 2 may come to nothing"
    script.resume()
    assert DropKept("n2", "b") not in script.train(3)
    assert DropKept("n2", "b") in script.train(4)


def test_a_late_report_of_a_void_last_committed_step_is_dropped() -> None:
    """A generation that went on from an earlier one computed it."""
    script = kept_here(copies=2)
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    survivors_pause(script, 2, "a", "c")
    assert tells(script, "b", "n2", 2, generation=2) == [DropKept("n2", "b")]


def test_what_a_generation_makes_void_is_kept_until_it_has_trained() -> None:
    """a's keeper has step 4 alone, 2 was committed. Generations 2 and 3 began on b's step 2, and
    came to nothing; it was let go of as soon as it was told, or as the next one began."""
    script = Script(Policy(1, 2))
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    script.run(a="n1", b="n2").train(1, 2)
    script.ready("c", "n3")
    own = Holding(2, "pp1.s1.tp1", S0, Tier.LIVE, 1)
    script.tell(WorkerLost, "a", "killed")
    script.paused("c")
    assert assignment_in(script.paused("b", own)).source.step == 2
    left = (kept(4, S0, space="pp1.s1.tp1"),)
    record = tuple(RecordStep(n, 1, 2, "ddp2", {"loss": 1.0 / n}) for n in (3, 4))
    assert script.tell(KeeperHolds, "n1", "a", left, record) == []
    script.tell(WorkerLost, "c", "killed")
    commands = script.paused("b", own)
    assert (assignment_in(commands).generation, assignment_in(commands).source.step) == (3, 2)
    assert DropKept("n1", "a") not in commands
    script.tell(NodeLost, "n2", "power")
    source = assignment_in(script.ready("d", "n3")).source
    assert (source.step, source.generation) == (4, 1)


def test_a_generation_of_whose_steps_nothing_is_left_makes_none_void() -> None:
    """a's keeper has step 4, 2 was committed. Generation 2 began on b's step 2, and is gone."""
    script = Script(Policy(1, 2))
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    script.run(a="n1", b="n2").train(1, 2)
    script.ready("c", "n3")
    own = Holding(2, "pp1.s1.tp1", S0, Tier.LIVE, 1)
    script.tell(WorkerLost, "a", "killed")
    script.paused("c")
    assert assignment_in(script.paused("b", own)).source.step == 2
    script.tell(NodeLost, "n2", "power")
    script.paused("c")
    left = (kept(1, S0, space="pp1.s1.tp1"), kept(4, S0, space="pp1.s1.tp1"))
    record = tuple(RecordStep(n, 1, 2, "ddp2", {"loss": 1.0 / n}) for n in (1, 2, 3, 4))
    commands = script.tell(KeeperHolds, "n1", "a", left, record)
    assert RollBack not in [type(command) for command in commands]
    source = assignment_in(commands).source
    assert (source.step, source.generation) == (4, 1)
    assert script.state.lineage.has(4, 1) and script.state.lineage.has(5, 3)
    recorded = [c for c in script.resume() + script.train(5) if isinstance(c, RecordStep)]
    assert [(c.step, c.generation, c.metrics["loss"]) for c in recorded] == [
        (3, 1, 1 / 3),
        (4, 1, 0.25),
        (5, 3, 0.2),
    ]


def test_what_was_left_goes_when_a_later_step_is_committed() -> None:
    script = kept_here()
    script.train(1, 2)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 1, 2)
    survivors_pause(script, 2, "a", "c")
    assert DropKept("n2", "b") not in script.resume()
    commands = script.train(3)
    assert commands[-1] == DropKept("n2", "b")
    assert script.state.left.shards == {}


def test_what_a_released_worker_left_goes_when_a_later_step_is_committed() -> None:
    """Until then it may be all that is left: those who stay crash before they hold a copy."""
    script = Script(Policy(1, 3))
    for node in ("n1", "n2", "n3"):
        script.keeper(node)
    script.run(a="n1", b="n2", c="n3").train(1)
    script.tell(NodeDraining, "n2", script.now_s + 30, "spot")
    commands = survivors_pause(script, 1, "a", "b", "c")
    assert ReleaseWorker("b", "its node is draining") in commands
    script.tell(WorkerLost, "b", "released")
    held = kept(1, "pp0.s0.tp0", space="pp1.s1.tp1")
    assert script.tell(KeeperHolds, "n2", "b", (held,)) == []
    script.resume()
    for worker in "ac":
        script.tell(WorkerLost, worker, "killed")
        script.tell(KeeperHolds, f"n{' abc'.index(worker)}", worker, ())
    source = assignment_in(script.ready("d", "n1")).source
    assert (source.step, source.tier) == (1, Tier.KEEPER)
    script.resume()
    assert DropKept("n2", "b") in script.train(2)


def test_what_a_released_worker_left_of_a_void_step_is_dropped() -> None:
    script = kept_here()
    script.tell(NodeDraining, "n2", script.now_s + 30, "spot")
    commands = survivors_pause(script, 0, "a", "b", "c")
    assert ReleaseWorker("b", "its node is draining") in commands
    assert tells(script, "b", "n2", 1) == [DropKept("n2", "b")]


# ------------------------------------------------------------------------------ what is damaged


def test_a_damaged_copy_at_a_keeper_falls_back_to_the_next_source() -> None:
    script = kept_here(1, REF)
    script.train(11, 12)
    script.tell(WorkerLost, "b", "killed")
    tells(script, "b", "n2", 11, 12)
    survivors_pause(script, 12, "a", "c")
    refused = script.tell(SourceRefused, "a", 2, "keeper:n2/b", "digest differs", S1)
    assert isinstance(refused[0], PauseWorkers)
    assert script.journalled("source_refused") == ["digest differs"]
    script.paused("a", Holding(12, THREE, S0, Tier.LIVE, 1))
    commands = script.paused("c", Holding(12, THREE, S2, Tier.LIVE, 1))
    assert assignment_in(commands).source == Source(10, Tier.CHECKPOINT, url=REF.url)
    assert [c.step for c in commands if isinstance(c, RollBack)] == [10]


def test_another_ones_copy_at_the_same_keeper_is_not_refused_with_it() -> None:
    """Two to a node: a's keeper has the copy that a kept for b."""
    script = Script(Policy(1, 2, strategy="fsdp", copies=2), REF)
    script.keeper("n1")
    script.run(a="n1", b="n1").train(11)
    held = tuple(kept(11, shard, space=TWO) for shard in (S0, S1))
    for worker in "ab":
        script.tell(WorkerLost, worker, "killed")
        script.tell(KeeperHolds, "n1", worker, held)
    source = assignment_in(script.ready("d", "n1")).source
    assert source.holders[S1] == (("keeper:n1/a", Tier.KEEPER), ("keeper:n1/b", Tier.KEEPER))
    script.tell(SourceRefused, "d", script.state.generation, "keeper:n1/a", "differs", S1)
    source = assignment_in(script.paused("d")).source
    assert source.holders == {
        S0: (("keeper:n1/a", Tier.KEEPER), ("keeper:n1/b", Tier.KEEPER)),
        S1: (("keeper:n1/b", Tier.KEEPER),),
    }
    script.resume()
    assert script.state.refused == {("keeper:n1/a", 11, S1)}  # it is still what it was


def test_a_worker_drops_what_it_finds_damaged_so_its_next_copy_counts() -> None:
    script = kept_here(copies=2)
    script.train(1, 2)
    script.tell(CollectiveFailed, "a", 1, 2, "reset")
    copies = {w: script.copies(w, 2) for w in "abc"}
    for worker in "abc":
        script.paused(worker, *copies[worker])
    script.tell(SourceRefused, "b", 2, "b", "digest differs", S1)
    assert script.state.refused == {("b", 2, S1)}
    for worker in "abc":
        script.paused(worker, *(h for h in copies[worker] if (worker, h.shard) != ("b", S1)))
    assert script.assignment.source.holders[S1] == (("c", Tier.PEER),)
    script.resume()
    assert not script.state.refused


# ------------------------------------------------------------------------ that do not answer

GONE = "keeper:n2/b: keeper:n2 can't be reached in 5 s"


def unreached(script: Script, *alone: str) -> list[Command]:
    """Everybody says so, and comes to its safe point."""
    generation = script.state.generation
    commands: list[Command] = []
    for worker in "ac":
        how: dict[str, Any] = {"kind": UNREACHABLE, "unread_by": alone}
        told = script.tell(SourceRefused, worker, generation, "keeper:n2/b", GONE, **how)
        assert worker == "a" or not told
        commands += told
    for worker in "ac":
        if script.state.phase == "pausing" and worker in script.state.ready:
            commands += script.paused(worker, Holding(11, THREE, SHARD_OF[worker], Tier.LIVE, 1))
    return commands


def test_a_keeper_that_does_not_answer_is_asked_again_and_nothing_is_struck() -> None:
    script = reading_from_n2()
    for _ in range(2):
        assert assignment_in(unreached(script)).source.holders[S1] == (
            ("keeper:n2/b", Tier.KEEPER),
        )
    assert not script.state.refused and script.state.fruitless == 0
    assert script.journalled("source_unreadable") == [f"{GONE}; it is asked again"] * 2
    script.resume()
    assert script.state.committed == 11 and not script.state.unreached


def test_one_that_never_answers_is_given_up_for_the_next_source() -> None:
    script = reading_from_n2()
    for _ in range(2):
        unreached(script)
    commands = unreached(script)
    assert [c.step for c in commands if isinstance(c, RollBack)] == [10]
    assert assignment_in(commands).source == Source(10, Tier.CHECKPOINT, url=REF.url)
    assert script.journalled("source_refused") == [f"{GONE}; 3 times in a row"]


def test_a_worker_that_alone_can_not_reach_a_keeper_is_left_out() -> None:
    script = reading_from_n2()
    for _ in range(2):
        unreached(script, "c")
    assignment = assignment_in(unreached(script, "c"))
    assert [m.worker for m in assignment.members] == ["a"]
    assert [m.worker for m in assignment.donors] == ["c"]
    assert assignment.source.step == 11 and not script.state.refused
    assert script.journalled("worker_left_out") == [
        f"it can't reach a keeper, and others can: {GONE}"
    ]


def test_a_copy_that_can_be_reached_is_asked_for_first() -> None:
    script = Script(Policy(1, 2, strategy="fsdp", copies=2), REF)
    script.keeper("n1")
    script.keeper("n2")
    script.run(a="n1", b="n2").train(11)
    held = tuple(kept(11, shard, space=TWO) for shard in (S0, S1))
    for worker, node in (("a", "n1"), ("b", "n2")):
        script.tell(WorkerLost, worker, "killed")
        script.tell(KeeperHolds, node, worker, held)
    first = assignment_in(script.ready("d", "n1")).source.holders[S1][0][0]
    generation = script.state.generation
    script.tell(SourceRefused, "d", generation, first, "no answer", kind=UNREACHABLE)
    source = assignment_in(script.paused("d")).source
    assert source.step == 11 and source.holders[S1][0][0] != first


def test_a_refusal_that_is_late_is_heard_of_keepers_too() -> None:
    """The group broke first; else the same keeper would be asked for ever."""
    script = reading_from_n2()
    generation = script.state.generation
    script.tell(CollectiveFailed, "c", generation, 11, "reset")
    assert script.state.fruitless == 1
    how: dict[str, Any] = {"kind": UNREACHABLE}
    assert script.tell(SourceRefused, "a", generation, "keeper:n2/b", GONE, **how) == []
    assert len(script.state.unreached) == 1 and script.state.fruitless == 0


# ---------------------------------------------------------------------- many that tell at a time


def bereft(workers: int, dead: int, copies: int = 1) -> Script:
    """So many of the workers have crashed, and the others are paused; keepers have yet to tell."""
    script = Script(Policy(1, workers, strategy="fsdp", copies=copies), REF)
    for number in range(workers):
        script.keeper(f"n{number}")
    script.run(**{f"w{number}": f"n{number}" for number in range(workers)}).train(11)
    ranks = script.ranks
    for worker in ranks[:dead]:
        script.tell(WorkerLost, worker, "killed")
    for worker in ranks[dead:]:
        script.paused(worker, script.live(worker, 11))
    assert script.state.phase == "pausing"
    return script


def test_what_can_not_decide_yet_is_noted_and_no_more() -> None:
    """Each look lays out a world, which takes seconds where it is large."""
    script = bereft(workers=66, dead=64)
    for rank in range(64):
        assert script.state.phase == "pausing"
        held = script.holding(11, rank, Tier.KEEPER)
        script.tell(KeeperHolds, f"n{rank}", f"w{rank}", (held,))
    assert script.state.phase == "forming" and script.assignment.source.step == 11
    assert len(script.journalled("awaiting_keeper")) == 1


def test_what_is_enough_ends_the_wait_whoever_has_yet_to_tell() -> None:
    """Two copies of each shard: every other keeper is silent."""
    script = bereft(workers=8, dead=7, copies=2)
    for rank in range(0, 8, 2):
        assert script.state.phase == "pausing"
        own, peer = (script.holding(11, r, Tier.KEEPER) for r in (rank, rank + 1))
        script.tell(KeeperHolds, f"n{rank}", f"w{rank}", (own, peer))
    assert script.state.phase == "forming" and script.assignment.source.step == 11
    assert script.state.left.awaited


def test_the_last_that_may_be_newer_ends_the_wait_with_nothing() -> None:
    script = bereft(workers=4, dead=3)
    for rank in range(2):
        held = (script.holding(11, rank, Tier.KEEPER),)
        assert script.tell(KeeperHolds, f"n{rank}", f"w{rank}", held) == []
    commands = script.tell(KeeperHolds, "n2", "w2", ())
    assert [c.step for c in commands if isinstance(c, RollBack)] == [10]


def test_a_word_costs_little_however_many_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    count, looks, last_before = 128, [], Lineage.last_before

    def counted(lineage: Lineage, generation: int) -> int | None:
        looks.append(generation)
        return last_before(lineage, generation)

    words = words_of_all(count)
    next(words)
    monkeypatch.setattr(Lineage, "last_before", counted)
    next(words, None)
    assert len(looks) < 20 * count
