"""Another controller has the job: what keepers have told, and tell again."""

from __future__ import annotations

from elastic_ft.core.assignment import Tier
from elastic_ft.core.commands import UseKeeper
from elastic_ft.core.events import (
    KeeperHolds,
    KeeperLost,
    KeeperReturned,
    StepHeld,
    WorkerLost,
)
from tests.core.adopted import changed, returned, trained
from tests.core.script import keeper_on


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
    assert not script.state.left.awaited, "c lives"


def test_another_keeper_of_that_node_is_a_new_one() -> None:
    script = trained(keepers=True)
    changed(script)
    script.keeper("n1")
    assert script.state.adoption is not None
    assert list(script.state.adoption.keepers) == ["n2"]


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
    new = script.holding(3, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (new,))
    assert script.state.left.shards == {("n2", "c"): (new,)}


def test_a_keeper_that_has_told_all_is_not_waited_for_again() -> None:
    """c says that it holds the same, and is heard later than its keeper."""
    script = trained(keepers=True)
    changed(script)
    returned(script, "a", "b", "c")
    for worker in "abc":
        script.applied(worker, 3)
    held = script.holding(3, 2, Tier.KEEPER)
    script.tell(KeeperHolds, "n2", "c", (held,))
    script.tell(StepHeld, "c", 1, 3)
    script.tell(WorkerLost, "c", "crashed")
    assert script.state.left.shards == {("n2", "c"): (held,)} and not script.state.left.awaited


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
