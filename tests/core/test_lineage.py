"""Which generation computed a step of this history: against one written down whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.lineage import KEPT, Lineage


def test_a_step_that_was_trained_again_is_another_state() -> None:
    """Generation 3 went on from step 40, came to 43, and lost 41 to 43; 4 trains them again."""
    lineage = Lineage().on(1, 0).on(3, 40).on(4, 40)
    assert lineage == Lineage(((1, 0), (4, 40)))
    assert [lineage.has(40, 1), lineage.has(41, 3), lineage.has(41, 4)] == [True, False, True]
    assert lineage.on(5, 41).has(42, 4) is False
    assert lineage.has(0, 0) and not lineage.has(0, 1)


def test_the_last_step_that_counts_of_who_has_no_part_any_more() -> None:
    lineage = Lineage().on(1, 0).on(2, 12)
    assert lineage.last_before(1) == 0
    assert lineage.last_before(2) == 12
    assert lineage.last_before(3) is None
    assert lineage.on(5, 10).last_before(2) == 10  # two steps of generation 1 are void, too


def test_a_generation_may_come_to_nothing() -> None:
    lineage = Lineage().on(1, 0).on(2, 40).on(3, 42)
    assert lineage.up_to(40).has(45, 1) and not lineage.has(45, 1)
    assert lineage.up_to(41).has(45, 2)


def test_what_came_before_the_first_generation_known_is_of_no_history() -> None:
    lineage = Lineage().on(4, 19)
    assert lineage.generation_of(19) is None
    assert not lineage.has(19, 4)
    for number in range(5, 5 + 2 * KEPT):
        lineage = lineage.on(number, number * 10)
    assert len(lineage.begun) == KEPT


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=8))
def test_it_tells_what_was_computed_by_whom(generations: list[tuple[int, int]]) -> None:
    """Each generation goes back some steps, then trains some: the truth is a list of who did."""
    lineage, truth, computed = Lineage(), [], {(0, 0)}
    for generation, (back, forth) in enumerate(generations, start=1):
        step = max(0, len(truth) - back)
        lineage, truth = lineage.on(generation, step), truth[:step] + [generation] * forth
        computed |= {(step + more, generation) for more in range(1, forth + 1)}
        good = {(0, 0), *enumerate(truth, start=1)}
        assert {state for state in computed if lineage.has(*state)} == good
        for since in range(1, generation + 1):
            older = max((s for s, by in good if by < since), default=0)
            last = lineage.last_before(since)
            assert last is not None and last >= older
