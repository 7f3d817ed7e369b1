"""Which faults fire where."""

from __future__ import annotations

from typing import get_args

from elastic_ft import faults
from elastic_ft.faults import Action, PointFault, Points

QUIET: Action = "corrupt"  # does nothing here


def test_a_fault_after_another_waits_for_the_next_generation() -> None:
    """A point that is reached once for each micro-batch would else fire both in one step."""
    fired: list[int] = []
    faults = (PointFault("forward", QUIET, step=3), PointFault("forward", QUIET, step=3, after=0))
    points = Points("w0", faults, fired.append)
    points.enter(1, 0, 2, 3, frozenset())
    points("forward")
    points("forward", 3)
    assert fired == [0]
    points.enter(2, 0, 2, 3, frozenset(fired))
    points("forward")
    points("forward", 3)
    assert fired == [0, 1]


def test_each_action_is_done_by_something() -> None:
    assert faults.ACTS.keys() == set(get_args(faults.Action))
