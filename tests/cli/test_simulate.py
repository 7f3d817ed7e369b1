"""``elastic-ft simulate``: seeded, whole, and in the order that the costs say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_ft.cli.app import run_command
from elastic_ft.sim.fleet import (
    SYSTEMS,
    Costs,
    Failure,
    FleetOutcome,
    compare_ways,
    elastic_ft,
    failures,
    llama3_failures,
    replica_drop,
    restart_all,
    spot,
)

UNITS, DAYS = 8, 0.5
COSTS = Costs()


def shares(outcome: FleetOutcome) -> float:
    parts = (outcome.goodput, outcome.away, outcome.paused, outcome.redone, outcome.checkpoints)
    assert all(part >= 0 for part in parts), outcome
    return sum(parts)


@pytest.mark.parametrize("rate", [llama3_failures(16_384), spot()], ids=["llama3", "spot"])
def test_shares_make_a_whole_and_a_seed_one_history(rate) -> None:
    outcomes = compare_ways(rate, UNITS, DAYS, COSTS, seed=3)
    assert outcomes == compare_ways(rate, UNITS, DAYS, COSTS, seed=3)
    assert outcomes != compare_ways(rate, UNITS, DAYS, COSTS, seed=4)
    for outcome in outcomes:
        assert shares(outcome) == pytest.approx(1, abs=1e-6)
    assert [outcome.system for outcome in outcomes] == ["restart-all", "replica-drop", "elastic_ft"]


def test_without_failures_all_is_useful() -> None:
    for system in SYSTEMS[1:]:
        outcome = system([], UNITS, DAYS, COSTS)
        formed_s = COSTS.form_s if system is elastic_ft else 0.0
        assert outcome.goodput == pytest.approx(1 - formed_s / (DAYS * 86400))
    restarts = restart_all([], UNITS, DAYS, replace(COSTS, checkpoint_stall_s=0.001))
    assert restarts.goodput == pytest.approx(1, abs=1e-3)


def test_one_loss_costs_what_it_should() -> None:
    """Unit-seconds, by hand: 8 units, one lost at 6000.0 s and back at 7000 s."""
    loss = [Failure(6000.0, 3, 7000.0)]
    whole = UNITS * DAYS * 86400
    dropped = replica_drop(loss, UNITS, DAYS, COSTS)
    assert dropped.paused * whole == pytest.approx(7 * 80 + 8 * 20)
    assert dropped.redone == pytest.approx(0, abs=1e-9)  # 6000 s are a thousand steps
    elastic = elastic_ft(loss, UNITS, DAYS, COSTS)
    # The first forming; the noticing, of all eight, as nobody knows; forming with 7, and with 8.
    paused = 8 * 20 + 8 * 0.1 + 7 * 20 + 8 * 20
    assert elastic.paused * whole == pytest.approx(paused, abs=1)
    assert elastic.redone * whole == pytest.approx(8 * ((6000 - 20) % 6), abs=0.1)
    assert elastic.away * whole == pytest.approx(1000, abs=COSTS.step_s * 8 / 7 + 1)
    assert elastic.interruptions == 1 and elastic.core_events > 50


def test_a_loss_of_who_waits_to_join_stops_nobody() -> None:
    again = [Failure(6000.0, 3, 7000.0), Failure(7000.2, 3, 9000.0)]
    outcome = elastic_ft(again, UNITS, DAYS, COSTS)
    assert outcome.goodput > 0.98


def test_failures_take_only_what_is_there() -> None:
    away: dict[int, float] = {}
    for failure in failures(spot(), UNITS, 2.0, 60.0, seed=1):
        assert away.get(failure.unit, 0.0) <= failure.at_s < failure.back_at_s
        away[failure.unit] = failure.back_at_s


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["simulate", "--gpus", "64", "--rate", "spot", "--days", "0.1"]
    assert run_command([*small, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    (row,) = first["rows"]
    assert (row["gpus"], row["units"], len(row["outcomes"])) == (64, 8, 3)
    assert run_command([*small, "--form-s", "5"]) == 0
    printed = capsys.readouterr().out
    assert "form_s 5: as given" in printed and "replica-drop" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "frost"], "--rate: 'frost'"),
        (["--unit-gpus", "64", "--gpus", "64"], "--unit-gpus"),
        (["--step-s", "0"], "--step-s"),
    ],
)
def test_bad_usage(arguments, complaint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["simulate", *arguments]) == 2
    assert complaint in capsys.readouterr().err
