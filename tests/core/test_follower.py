"""What a worker does about what its controller says: nothing of an older generation counts (I1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.commands import Bench, PauseWorkers, ReleaseWorker
from elastic_ft.core.follower import (
    AnswerPause,
    BeginGeneration,
    BreakOff,
    DropAfter,
    Follower,
    Heard,
    Leave,
    LineEnded,
    PauseAtBoundary,
    Reaction,
    hear,
    rest,
)


def pause(generation: int, *, abort: bool = True) -> PauseWorkers:
    return PauseWorkers(generation, (), abort, "node n1 is lost")


def bench(generation: int, step: int = 7) -> Bench:
    return Bench("w0", generation, step)


class Play:
    """One worker: what it does at once, and what at its safe point."""

    def __init__(self, *heard: Heard) -> None:
        self.follower = Follower()
        for message in heard:
            self.hear(message)

    def hear(self, message: Heard) -> tuple[Reaction, ...]:
        self.follower, actions = hear(self.follower, message)
        return actions

    def rest(self) -> tuple[Reaction, ...]:
        self.follower, actions = rest(self.follower)
        return actions


def training(generation: int) -> Play:
    play = Play(pause(generation))
    assert play.rest() == (AnswerPause(generation),)
    play.hear(BeginGeneration(generation))
    assert play.rest() == (BeginGeneration(generation),)
    return play


# ------------------------------------------------------------------------------- pauses


def test_a_pause_breaks_off_what_runs_and_is_answered_at_the_safe_point_once() -> None:
    play = training(1)
    assert not play.follower.is_over
    assert play.hear(pause(2)) == (BreakOff("node n1 is lost"),)
    assert play.follower.is_over
    assert play.rest() == (AnswerPause(2),)
    assert play.rest() == ()


def test_a_planned_pause_waits_for_the_boundary_until_it_can_wait_no_longer() -> None:
    play = training(1)
    assert play.hear(pause(2, abort=False)) == (PauseAtBoundary(),)
    assert play.hear(pause(2)) == (BreakOff("node n1 is lost"),)
    assert play.rest() == (AnswerPause(2),)


@pytest.mark.parametrize("abort", [True, False])
def test_at_the_safe_point_nothing_runs_that_a_pause_could_stop(abort: bool) -> None:
    play = Play()
    assert play.hear(pause(1, abort=abort)) == ()
    assert play.rest() == (AnswerPause(1),)


def test_a_generation_opened_during_another_ones_pause_is_the_one_answered() -> None:
    play = training(1)
    play.hear(pause(2))
    play.hear(pause(3))
    assert play.rest() == (AnswerPause(3),)


def test_a_generation_that_breaks_unasked_is_waited_in_without_an_answer() -> None:
    """A worker that was up in time for the first one was never asked to pause for it."""
    play = Play(BeginGeneration(1))
    assert play.rest() == (BeginGeneration(1),)
    assert play.rest() == ()
    assert play.hear(pause(2)) == ()
    assert play.rest() == (AnswerPause(2),)


def test_a_pause_heard_again_while_its_generation_trains_stops_nothing() -> None:
    play = training(2)
    assert play.hear(pause(2)) == ()
    assert not play.follower.is_over
    assert play.rest() == ()


# -------------------------------------------------------------------------------- fence


@pytest.mark.parametrize(
    "late", [pause(1), pause(1, abort=False), bench(1), BeginGeneration(1)], ids=repr
)
def test_what_is_older_than_the_fence_changes_nothing(late: Heard) -> None:
    play = training(2)
    before = play.follower
    assert play.hear(late) == ()
    assert play.follower == before


def test_a_generation_that_is_over_before_it_began_is_not_begun() -> None:
    play = Play(pause(1))
    play.rest()
    play.hear(BeginGeneration(1))
    play.hear(pause(2))
    assert play.rest() == (AnswerPause(2),)
    assert play.hear(BeginGeneration(2, "form")) == ()
    assert play.rest() == (BeginGeneration(2, "form"),)


def test_groups_are_not_formed_for_what_is_over() -> None:
    assert training(1).follower.why_broken_off == ""
    play = training(1)
    play.hear(pause(2, abort=False))
    assert play.follower.why_broken_off == "generation 2 has been opened"
    play = training(1)
    play.hear(ReleaseWorker("w0", "two workers are wanted"))
    assert play.follower.why_broken_off == "two workers are wanted"
    play = training(1)
    play.hear(LineEnded())
    assert play.follower.why_broken_off == "the controller is gone"


# -------------------------------------------------------------------------------- bench


def test_a_benched_worker_drops_once_what_others_train_again() -> None:
    play = training(1)
    play.hear(pause(2))
    play.rest()
    assert play.hear(bench(2, step=5)) == ()
    assert play.rest() == (DropAfter(5),)
    assert play.rest() == ()


def test_a_donor_that_is_benched_is_done_with_its_generation() -> None:
    play = training(3)
    assert play.hear(bench(3, step=5)) == ()
    assert play.follower.is_over and not play.follower.why_broken_off
    assert play.rest() == (DropAfter(5),)


def test_who_is_benched_and_then_paused_drops_before_it_tells_what_it_holds() -> None:
    play = training(1)
    play.hear(pause(2))
    play.rest()
    play.hear(bench(2, step=5))
    play.hear(pause(3))
    assert play.rest() == (DropAfter(5), AnswerPause(3))


def test_who_is_benched_and_then_given_a_rank_drops_before_it_begins() -> None:
    play = training(1)
    play.hear(pause(2))
    play.rest()
    play.hear(bench(2, step=5))
    play.hear(BeginGeneration(3))
    assert play.rest() == (DropAfter(5), BeginGeneration(3))


# ------------------------------------------------------------------------------ the end


def test_who_is_released_breaks_off_and_leaves() -> None:
    play = training(1)
    assert play.hear(ReleaseWorker("w0", "")) == (BreakOff(""),)
    assert play.follower.is_over
    assert play.rest() == (Leave(),)


def test_who_hears_nothing_any_more_breaks_off_and_leaves_lost() -> None:
    play = training(1)
    assert play.hear(LineEnded()) == (BreakOff("the controller is gone"),)
    assert play.follower.is_over
    assert play.rest() == (Leave(lost=True),)


@pytest.mark.parametrize("last", [ReleaseWorker("w0", "done"), LineEnded()])
def test_at_the_safe_point_who_leaves_begins_nothing_and_answers_nothing(last: Heard) -> None:
    play = Play(pause(1), BeginGeneration(1))
    assert play.hear(last) == ()
    assert play.rest() == (Leave(lost=isinstance(last, LineEnded)),)


# ------------------------------------------------------------------- whatever may come

generations = st.integers(1, 6)
messages = st.one_of(
    st.builds(pause, generations, abort=st.booleans()),
    st.builds(BeginGeneration, generations),
    st.builds(bench, generations, st.integers(0, 9)),
    st.just("rest"),
)


@given(st.lists(messages, max_size=40))
def test_generations_and_answers_only_ever_rise(script: list[Heard | str]) -> None:
    play, begun, answered = Play(), [0], [0]
    for message in script:
        fence = play.follower.fence
        if isinstance(message, str):
            for action in play.rest():
                if isinstance(action, BeginGeneration):
                    assert action.generation == fence, "an older one is over"
                    begun.append(action.generation)
                elif isinstance(action, AnswerPause):
                    answered.append(action.generation)
        else:
            actions = play.hear(message)
            assert not actions or play.follower.current < message.generation  # type: ignore[union-attr]
        assert play.follower.fence >= fence
    assert begun == sorted(begun) and answered == sorted(set(answered))


# ---------------------------------------------------------- another controller says it again


def told() -> st.SearchStrategy[list[Heard]]:
    generations = st.integers(1, 4)
    kinds = [
        st.builds(pause, generations, abort=st.booleans()),
        st.builds(BeginGeneration, generations),
        st.builds(bench, generations),
    ]
    return st.lists(st.one_of(kinds), max_size=8)


@given(told(), st.data())
def test_what_is_said_again_is_neither_answered_nor_done_twice(
    heard: list[Heard], data: st.DataObject
) -> None:
    """The next controller repeats the newest pause, or bench, whether it was heard or not."""
    play = Play()
    for message in heard:
        play.hear(message)
        if data.draw(st.booleans()):
            play.rest()
    play.rest()
    before = play.follower
    newest = [m for m in heard if not isinstance(m, BeginGeneration)][-1:]
    for message in newest:
        if message.generation < before.fence:  # type: ignore[union-attr]
            continue  # it is not what the next one would say
        at_once = play.hear(message)
        assert AnswerPause not in map(type, at_once)
        if isinstance(message, PauseWorkers) and before.current < message.generation:
            assert play.rest() == ()
        elif isinstance(message, Bench) and not before.current:
            assert play.rest() == (DropAfter(message.step),)
        elif isinstance(message, PauseWorkers):
            assert at_once == () and not play.follower.is_over


@pytest.mark.parametrize("again", [pause(2), pause(2, abort=False), bench(2)], ids=repr)
def test_said_again_before_it_was_done_it_is_done_once(again: Heard) -> None:
    play = training(1)
    play.hear(again)
    play.hear(again)
    (action,) = play.rest()
    assert action == (DropAfter(7) if isinstance(again, Bench) else AnswerPause(2))
    assert play.rest() == ()


def test_a_release_said_again_is_one() -> None:
    play = training(1)
    assert play.hear(ReleaseWorker("w0", "over")) == (BreakOff("over"),)
    play.hear(ReleaseWorker("w0", "it was released"))
    assert play.rest() == (Leave(),)
