"""Where members are between two steps, and who is ahead of whom."""

from __future__ import annotations

from elastic_ft.worker.whereabouts import Whereabouts, furthest, without_catching_up

STEP = 7  # that the generation begins with


def survivor() -> Whereabouts:
    found = Whereabouts()
    found.ask()
    found.begin_step(STEP)
    found.end_step()
    return found


def in_errand(member: Whereabouts, number: int = 1) -> Whereabouts:
    for _ in range(number):
        member.is_pending = False
        member.begin_errand()
    return member


def asked(member: Whereabouts) -> Whereabouts:
    member.ask()
    return member


def stepping(number: int) -> Whereabouts:
    found = asked(survivor())
    found.begin_step(number)
    return found


def places(*members: Whereabouts) -> list[float]:
    return without_catching_up([member.place(STEP) for member in members])


def test_who_comes_in_where_all_ask_for_a_batch_is_one_of_them() -> None:
    assert furthest(places(asked(survivor()), asked(Whereabouts()))) is None
    assert furthest(places(asked(Whereabouts()), asked(Whereabouts()))) is None


def test_who_evaluates_before_its_first_batch_does_so_without_those_that_train() -> None:
    joiner, other = in_errand(Whereabouts()), asked(survivor())
    assert furthest(places(joiner, other)) == 1
    assert furthest(places(Whereabouts(), other)) == 1, "it may be about to"
    assert furthest(places(Whereabouts(), Whereabouts())) is None, "the job begins, or goes on"


def test_who_straddles_a_step_is_behind_those_that_made_it() -> None:
    """Its function was begun for a step whose state it was given: it has none of its own."""
    straddler = stepping(STEP)
    for made_it in (survivor(), in_errand(survivor()), asked(survivor())):
        assert furthest(places(straddler, made_it)) == 1
    assert furthest(places(straddler, stepping(STEP + 1))) == 1


def test_who_is_in_the_next_step_is_ahead_of_all() -> None:
    others = asked(Whereabouts()), in_errand(asked(survivor()), 5), stepping(STEP + 1)
    assert furthest(places(*others)) == 2


def test_what_comes_before_asking_for_a_batch_is_no_errand_of_after() -> None:
    """The first after the step is another than the first that the loop makes with its batch."""
    before, after = in_errand(survivor()), in_errand(asked(in_errand(survivor())))
    assert furthest(places(before, after)) == 1
    ended = in_errand(survivor())
    ended.is_pending = False
    assert furthest(places(ended, asked(survivor()))) == 1


def test_a_joiner_has_none_of_what_the_others_do_meanwhile() -> None:
    joiner = asked(Whereabouts())
    for other in (survivor(), in_errand(survivor()), in_errand(asked(survivor()))):
        assert furthest(places(joiner, other)) == 1
