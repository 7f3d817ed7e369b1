"""What was once wrong with real workers and the simulator could not see: undone, it is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.sim import SimFault, SimKill, SimScenario, SimViolation, sim_policy, simulate
from elastic_ft.sim.sim_machines import UNHEARD

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp", "hsdp")


def show_seen(scenarios: Iterable[SimScenario], undone: str, seen_as: str) -> None:
    """With the correction no check complains, and none but this one without."""
    found = []
    for scenario in scenarios:
        simulate(scenario)
        try:
            simulate(scenario, undone={undone})
        except SimViolation as error:
            found.append(str(error))
    assert found, "it is never hit: nothing is shown"
    assert all(error.startswith(seen_as) for error in found), found


# ------------------------------------------------------------------ a restore in pieces

SECOND = ("crash_worker", "crash_keeper", "kill_controller", "break_collective")


def broken_restore(seed: int) -> SimScenario:
    """A worker goes; and while the others get their state, another one, a keeper, the controller,
    or the group: once, or twice."""
    first = SimFault("crash_worker", 3, "running", 0.1, seed, 1.0)
    second = SimFault(SECOND[seed % 4], 3, "forming", seed % 23 / 10, seed, 0.5)
    third = SimFault(SECOND[seed // 4 % 4], 3, "forming", 2.0 + seed % 19 / 10, seed, 0.5)
    workers = 2 + seed % 2
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, workers, strategy=STRATEGIES[seed % 3], shard_size=2),
        nodes=workers,
        workers_per_node=1,
        steps=8,
        restore_s=2.0,
        faults=(first, second, third)[: 2 + seed // 2 % 2],
        adopts=True,
    )


def test_a_layout_that_was_never_filled_is_no_state() -> None:
    show_seen(map(broken_restore, range(120)), "unfilled", "I4: ")


# ------------------------------------------------------------------ the end of a job


def ending(seed: int) -> SimScenario:
    """As it ends its store can't be written, by one node or by any; and in every other one the
    controller goes, too."""
    kind = ("store_unwritten", "store_down", "store_down")[seed % 3]
    away = SimFault(kind, 7, "running", seed % 25 / 4, seed, 15.0)
    goes = SimFault("kill_controller", 7, "running", 1.0 + seed % 11, seed, (0.4, 6.0)[seed % 2])
    return SimScenario(
        seed=seed,
        policy=sim_policy(
            2, 2 + seed % 3, strategy=STRATEGIES[seed // 3 % 3], final_checkpoint=True
        ),
        nodes=2 + seed % 3,
        workers_per_node=1,
        steps=8,
        faults=(away, goes)[: 1 + seed // 2 % 2],
        adopts=True,
    )


@pytest.mark.parametrize(
    ("undone", "seen_as"), [("insists", "I5: "), ("agrees", "I6: "), ("republishes", "I5: ")]
)
def test_a_store_that_is_away_as_the_job_ends(undone: str, seen_as: str) -> None:
    show_seen(map(ending, range(75)), undone, seen_as)


def test_nobody_who_waits_for_the_last_uploads_is_ended() -> None:
    ends: Counter[str] = Counter()
    for seed in range(40):
        ends += simulate(ending(seed)).ends
    assert not ends


# ------------------------------------------------------------------ words that never come


def unheard(line: int) -> SimScenario:
    """The controller goes at about the time of the first step."""
    return SimScenario(
        seed=line,
        policy=sim_policy(2, 2, strategy=STRATEGIES[line % 3]),
        nodes=2,
        workers_per_node=1,
        steps=8,
        adopts=True,
        kills=(SimKill(line, after_s=6.0),),
    )


def test_a_first_report_needs_nobody_in_charge() -> None:
    show_seen(map(unheard, range(1, 30)), "first-report", "I6: ")


def starting(seed: int) -> SimScenario:
    """A worker goes; and the controller, while the one in its place starts."""
    crash = SimFault("crash_worker", 3, "running", 0.0, seed, 1.0)
    goes = SimFault("kill_controller", 3, "running", 1.0 + seed % 10 / 4, 0, (0.4, 6.0)[seed % 2])
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 3, strategy=STRATEGIES[seed % 3]),
        nodes=3,
        workers_per_node=1,
        steps=20,
        faults=(crash, goes),
        adopts=True,
    )


def test_one_whose_first_call_finds_nobody_is_made_up_for() -> None:
    ends: Counter[str] = Counter()
    for seed in range(40):
        report = simulate(starting(seed))
        assert not report.steps_lost
        ends += report.ends
    assert ends[UNHEARD] > 0
