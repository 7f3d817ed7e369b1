"""Which saved states the next controller may go on from."""

from __future__ import annotations

from elastic_ft.core.commands import RecordStep
from elastic_ft.core.rescuing import candidates

SPACE = "pp1.s2.tp1"


def known(*generations: int, first: int = 1) -> dict[int, RecordStep]:
    """Lines from step ``first`` on, computed so."""
    steps = enumerate(generations, first)
    return {n: RecordStep(n, by, 2, "fsdp2", {"loss": 1.0}) for n, by in steps}


def test_the_newest_comes_first_with_the_steps_that_are_not_recorded() -> None:
    record = known(1, 1, 1, 1)
    records = {(step, 1, SPACE): record for step in (3, 4, 2)}
    found = list(candidates(records, 3, {1: 1, 2: 1, 3: 1}))
    assert [cut[0] for cut, _ in found] == [4, 3, 2]
    assert [[line.step for line in since] for _, since in found] == [[4], [], []]


def test_what_was_trained_again_is_no_candidate() -> None:
    """Generation 1 had come to step 4; step 3 on was lost, and generation 2 is at step 3."""
    records = {(4, 1, SPACE): known(1, 1, 1, 1), (3, 2, SPACE): known(1, 1, 2)}
    found = list(candidates(records, 3, {1: 1, 2: 1, 3: 2}))
    assert [cut for cut, _ in found] == [(3, 2, SPACE)]
    assert list(candidates({(3, 1, SPACE): {}}, 3, {1: 1, 2: 1, 3: 2})) == []


def test_what_would_leave_a_hole_is_no_candidate() -> None:
    records = {(5, 1, SPACE): known(1, 1, first=4), (4, 1, SPACE): known(1, 1, first=3)}
    computed_by = {1: 1, 2: 1}
    assert [cut[0] for cut, _ in candidates(records, 2, computed_by)] == [4]
    assert [cut[0] for cut, _ in candidates(records, 2, computed_by, newest=3)] == [5, 4]
