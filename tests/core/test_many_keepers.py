"""Many keepers that tell at a time what ended workers left with them."""

from __future__ import annotations

import pytest

from elastic_ft.core.assignment import Tier
from elastic_ft.core.commands import RollBack
from elastic_ft.core.events import KeeperHolds, WorkerLost
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.policy import Policy
from tests.core.left import REF, words_of_all
from tests.core.script import Script


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
