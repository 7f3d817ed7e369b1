"""What ended workers left: when it is dropped, refused, or asked for again."""

from __future__ import annotations

from typing import Any

from elastic_ft.core.assignment import Holding, Source, Tier
from elastic_ft.core.commands import (
    Command,
    DropKept,
    PauseWorkers,
    RecordStep,
    ReleaseWorker,
    RollBack,
    StartTimer,
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
    WorkerLost,
    WorkerReturned,
)
from elastic_ft.core.policy import Policy
from tests.core.left import (
    REF,
    S0,
    S1,
    S2,
    SHARD_OF,
    THREE,
    TWO,
    kept,
    kept_here,
    reading_from_n2,
    survivors_pause,
    tells,
)
from tests.core.script import Script, assignment_in, keeper_on

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
    assert not script.state.refused and script.state.blame.fruitless == 0
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
    assert script.state.blame.fruitless == 1
    how: dict[str, Any] = {"kind": UNREACHABLE}
    assert script.tell(SourceRefused, "a", generation, "keeper:n2/b", GONE, **how) == []
    assert len(script.state.unreached) == 1 and script.state.blame.fruitless == 0
