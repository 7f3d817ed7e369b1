"""Who hangs, judged from what is known of each worker's progress."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ft.core.assignment import Keeper, Member
from elastic_ft.core.events import KeeperLost, WorkerLost
from elastic_ft.core.hangs import Progress
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import Adoption
from elastic_ft.core.state import State
from elastic_ft.core.table import Table
from tests.core.script import Script

HANG_S, SILENT_S = 20.0, 10.0


def trained() -> Script:
    return Script(Policy(1, 3)).run(a="n1", b="n2", c="n3")


def beaten(until_s: float, **places: tuple[int, int]) -> Progress:
    """Every worker has stood at its (step, place) since second 0, and beats each second."""
    progress = Progress(HANG_S, SILENT_S)
    progress.measured(1.0, world=3)
    for second in range(int(until_s) + 1):
        for worker, (step, place) in places.items():
            progress.beat(worker, step, place, place, now_s=float(second))
    return progress


def judged(progress: Progress, script: Script, now_s: float) -> tuple[list[str], bool]:
    found = progress.judge(script.state, now_s)
    return sorted(found.hung), bool(found.stuck)


def test_who_is_furthest_behind_when_nobody_moves_is_to_blame() -> None:
    script, places = trained(), {"a": (5, 3), "b": (5, 1), "c": (5, 3)}
    assert judged(beaten(19, **places), script, 19.0) == ([], False)
    progress = beaten(21, **places)
    assert judged(progress, script, 21.0) == (["b"], False)
    (hung,) = progress.judge(script.state, 21.0).hung.values()
    assert hung.since_s == 0.0 and "furthest behind" in hung.reason


def test_while_one_moves_nobody_hangs() -> None:
    progress = beaten(21, a=(5, 3), b=(5, 1), c=(5, 3))
    progress.beat("c", 5, 4, 4, now_s=21.0)
    assert judged(progress, trained(), 22.0) == ([], False)


def test_all_at_one_place_are_stuck_and_nobody_is_named() -> None:
    assert judged(beaten(21, a=(5, 3), b=(5, 3), c=(5, 3)), trained(), 21.0) == ([], True)


def test_silence_is_proof_enough() -> None:
    script, progress = trained(), beaten(5, a=(5, 3), b=(5, 3), c=(5, 3))
    for second in range(6, 17):
        progress.beat("a", 5, 3, 3, now_s=float(second))
        progress.beat("c", 5, 3, 3, now_s=float(second))
    assert judged(progress, script, 16.0) == (["b"], False)
    assert progress.judge(script.state, 16.0).hung["b"].since_s == 5.0
    script.ready("d", "n4")  # it has no rank, and is never heard of
    assert judged(progress, script, 16.0) == (["b"], False)
    assert judged(progress, script, 27.0)[0] == ["a", "b", "c", "d"]


def test_whatever_a_worker_says_is_a_sign_of_life() -> None:
    """One that imports, and so beats late, has just said that it is ready."""
    progress = beaten(5, a=(5, 3), b=(5, 3), c=(5, 3))
    for worker in ("a", "b", "c"):
        progress.heard(worker, 15.5)
    progress.heard("d", 15.5)  # it is not known yet
    assert judged(progress, trained(), 16.0) == ([], False)
    assert judged(progress, trained(), 25.4) == ([], True)  # not silent, but nobody moves
    assert judged(progress, trained(), 25.6) == (["a", "b", "c"], False)


def test_a_hang_on_the_way_to_a_boundary_shows_among_those_who_are_not_there_yet() -> None:
    script = Script(Policy(1, 3)).run(a="n1", b="n2")
    script.ready("c", "n3")  # the world is full with it: it joins at the next boundary
    assert (script.state.phase, script.state.abort) == ("pausing", False)
    progress = beaten(21, a=(5, 3), b=(5, 1), c=(0, 0))
    assert judged(progress, script, 21.0) == (["b"], False)
    script.paused("a", script.live("a", 5))
    assert judged(progress, script, 21.0) == ([], True)


@pytest.mark.parametrize("phase", ["pausing", "forming"])
def test_breaking_off_and_forming_have_deadlines_of_their_own(phase: str) -> None:
    script, places = trained(), {"a": (5, 3), "b": (5, 1)}
    script.tell(WorkerLost, "c", "killed")
    if phase == "forming":
        for worker in ("a", "b"):
            script.paused(worker, script.live(worker, 5))
    assert script.state.phase == phase
    assert judged(beaten(21, **places), script, 21.0) == ([], False)


def test_time_in_which_nobody_looked_says_nothing() -> None:
    progress = beaten(5, a=(5, 3), b=(5, 1), c=(5, 3))
    progress.overlook(30.0)
    assert judged(progress, trained(), 36.0) == ([], False)


def test_a_new_step_is_a_move() -> None:
    progress = beaten(19, a=(5, 3), b=(5, 3), c=(5, 3))
    progress.applied("b", 6, 19.0)
    assert judged(progress, trained(), 21.0) == ([], False)
    assert progress.still_s(trained().state, 21.0) == {0: 21.0, 1: 2.0, 2: 21.0}


def test_a_step_that_takes_longer_than_the_timeout_is_no_hang() -> None:
    """Of 130 s, say, all of which its one wait for the device takes."""
    script, places = trained(), {"a": (5, 3), "b": (5, 3), "c": (5, 3)}
    progress = beaten(389, **places)
    for _ in range(15):
        progress.measured(130.0, world=3)
    assert judged(progress, script, 389.0) == ([], False)
    assert judged(progress, script, 391.0) == ([], True)


def test_steps_of_fewer_members_take_longer() -> None:
    progress = Progress(HANG_S, SILENT_S)
    progress.measured(10.0, world=8)
    assert (progress.still_max_s(8), progress.still_max_s(2)) == (30.0, 120.0)


def test_one_long_step_among_short_ones_makes_no_hang_longer() -> None:
    progress = Progress(HANG_S, SILENT_S)
    for took_s in (900.0, 1.0, 1.0):
        progress.measured(took_s, world=3)
    assert progress.still_max_s(3) == HANG_S


def test_the_first_step_has_longer() -> None:
    """It compiles, tunes and connects, and nothing is known of its length."""
    script, progress = trained(), Progress(HANG_S, SILENT_S)
    for second in range(82):
        for worker in ("a", "b", "c"):
            progress.beat(worker, 1, 3, 3, now_s=float(second))
    assert judged(progress, script, 79.0) == ([], False)
    assert judged(progress, script, 81.0) == ([], True)
    progress.measured(0.0, world=3)
    assert judged(progress, script, 79.0) == ([], False)
    progress.measured(1.0, world=3)
    assert judged(progress, script, 79.0) == ([], True)


def test_a_silent_keeper_is_named_in_whatever_phase() -> None:
    script, progress = Script(Policy(2, 3)), Progress(HANG_S, SILENT_S)
    script.keeper("n1")
    script.keeper("n2")
    assert script.state.phase == "starting"
    assert progress.silent_keepers(script.state, 0.0) == {}
    for second in range(1, 12):
        progress.keeper_beat("n2", float(second))
    assert progress.silent_keepers(script.state, 10.0) == {}
    (silent,) = progress.silent_keepers(script.state, 11.0).items()
    assert silent[0] == "n1" and silent[1].since_s == 0.0
    progress.overlook(5.0)  # nobody looked
    assert progress.silent_keepers(script.state, 15.0) == {}


def test_a_keeper_that_starts_again_is_heard_of_anew() -> None:
    script, progress = Script(Policy(1, 3)), Progress(HANG_S, SILENT_S)
    script.keeper("n1")
    progress.keeper_beat("n1", 0.0)
    script.tell(KeeperLost, "n1")
    assert progress.silent_keepers(script.state, 50.0) == {}
    script.keeper("n1")
    assert progress.silent_keepers(script.state, 60.0) == {}


def on_gpus(until_s: float, **left: int) -> Progress:
    """All threads have stood at one place since second 0, where they wait for their GPUs."""
    progress = Progress(HANG_S, SILENT_S)
    progress.measured(1.0, world=3)
    for second in range(int(until_s) + 1):
        for worker, layers in left.items():
            progress.beat(worker, 5, 3, 3, layers, now_s=float(second))
    return progress


def test_the_gpu_with_most_left_to_do_is_to_blame_where_all_threads_wait_for_theirs() -> None:
    progress, script = on_gpus(21, a=4, b=13, c=3), trained()
    assert judged(progress, script, 21.0) == (["b"], False)
    (hung,) = progress.judge(script.state, 21.0).hung.values()
    assert (
        hung.since_s == 0.0 and "its GPU has 13 passes of layers left, another's 3" in hung.reason
    )


def test_gpus_of_which_nothing_tells_them_apart_name_nobody() -> None:
    assert judged(on_gpus(21, a=4, b=4, c=4), trained(), 21.0) == ([], True)
    assert judged(on_gpus(21, a=4, b=-1, c=3), trained(), 21.0) == ([], True)  # of b: not known
    assert judged(on_gpus(21, a=4, b=4, c=3), trained(), 21.0) == ([], True)  # most stand as far


def test_a_gpu_that_still_computes_is_no_hang() -> None:
    progress = on_gpus(21, a=4, b=13, c=3)
    progress.beat("b", 5, 3, 3, 12, now_s=21.0)
    assert judged(progress, trained(), 22.0) == ([], False)


def test_who_has_still_to_call_is_not_taken_for_hung() -> None:
    """Those of a stopped controller hear of the next one by the silence alone."""
    member = Member("w0", "n0", "host", 1)
    keeper = Keeper("n0", ("host", 1))
    waiting = Adoption(2, 0.0, Table({"w0": None}), Table({"n0": None}))
    state = State(phase="running", ready=Table({"w0": member}), keepers={"n0": keeper})
    progress = Progress(60.0, 1.0)
    for adoption, hung in ((waiting, False), (None, True)):
        state = replace(state, adoption=adoption)
        for now_s in (0.0, 10.0) if adoption else (12.0,):
            assert bool(progress.judge(state, now_s).hung) == hung, now_s
            assert bool(progress.silent_keepers(state, now_s)) == hung, now_s
