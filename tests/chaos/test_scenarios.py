"""A small selection of scenarios for real; on the simulator all that it can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.cli import run_all
from chaos.outcome import FAILED, PASSED, ScenarioOutcome
from chaos.scenario import SCENARIOS, Scenario, load_scenario
from chaos.soak import make_round
from chaos.trial import Stage, job_of, lacks, run_trial
from elastic_ft.cli.app import run_command

ALL = {path.stem: load_scenario(path.stem) for path in sorted(SCENARIOS.glob("*.yaml"))}


def assert_passed(outcome: ScenarioOutcome) -> None:
    assert outcome.failures == [], outcome.summary


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if "sim" in each.runs_on])
def test_on_the_simulator(name: str, stage: Stage) -> None:
    assert_passed(run_trial(name, ALL[name], "sim", stage))


def test_on_plain_processes(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    """Then ``chaos check`` is content with its folder, until somebody loses a sample of it."""
    assert_passed(run_trial("worker-killed", ALL["worker-killed"], "processes", stage))
    folder = stage.out / "worker-killed-processes" / "run"
    assert run_command(["chaos", "check", str(folder)]) == 0
    ledger = folder / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    lines[3]["samples"][0] = lines[2]["samples"][0]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capfd.readouterr()
    assert run_command(["chaos", "check", str(folder)]) == 1
    found = capfd.readouterr().out.splitlines()
    assert [line[:8] for line in found if line.startswith("FAIL")] == ["FAIL  I2"]


def test_who_is_cut_off_in_one_direction_stops(stage: Stage) -> None:
    scenario = ALL["network-cut-in"]
    if why := lacks(scenario, "network"):
        pytest.skip(why)
    assert_passed(run_trial("network-cut-in", scenario, "network", stage))


def test_a_fault_that_never_fires_fails(stage: Stage) -> None:
    fault = {"at_step": 10_000, "kill": "worker", "of_rank": 0}
    values = {"job": {"steps": 5}, "faults": [fault], "expect": {"same_losses": False}}
    scenario = Scenario.model_validate(values)
    outcome = run_trial("never", scenario, "processes", stage)
    assert [verdict.claim for verdict in outcome.failures] == ["every fault fired"]
    assert "kill worker of rank 0 at step 10000" in outcome.failures[0].found


@pytest.mark.parametrize("tier", ["processes", "ray"])
def test_every_round_of_a_soak_can_run_on_its_tier(tier: str) -> None:
    for seed in range(300):
        scenario = make_round(seed, tier)  # type: ignore[arg-type]
        assert tier in scenario.runs_on
        assert scenario == make_round(seed, tier)  # type: ignore[arg-type]


def test_one_trial_leaves_nothing_in_the_job_of_the_next() -> None:
    first = job_of("first", ALL["store-faults"])
    first["checkpoint"]["url"] = "s3://bucket/first"
    assert "url" not in job_of("second", ALL["store-faults"])["checkpoint"]


def test_only_the_scenarios_of_a_tier_are_run(tmp_path: Path) -> None:
    scenario = ALL["worker-killed"].model_copy(update={"tiers": ("sim",)})
    assert run_all([("one", scenario)], None, tmp_path, 1.0, {"ray"}) == FAILED
    assert run_all([("one", scenario)], None, tmp_path, 1.0, {"ray", "sim"}) == PASSED
