"""The Prometheus rules: valid, each alert fires in a unit test, and operators are told of each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ft.core.commits import PLANNED
from elastic_ft.observe.catalogue import METRICS
from tests.observe.conftest import tool

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule["alert"] for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
SERVED = {f"elastic_ft_{metric.name}" for metric in METRICS.values()}
UNIT_TESTS = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]


def run(*command: str) -> str:
    done = subprocess.run(
        [tool(command[0]), *command[1:]],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_pass_their_unit_tests() -> None:
    assert "SUCCESS" in run("promtool", "check", "rules", "rules.yml")
    assert "SUCCESS" in run("promtool", "test", "rules", "rules_test.yml")


def test_failures_are_all_that_nobody_planned() -> None:
    (rule,) = [rule for rule in RULES if rule.get("record") == "elastic_ft:failures:increase1h"]
    match = re.search(r'cause!~"([^"]*)"', rule["expr"])
    assert match is not None
    assert set(match[1].split("|")) == set(PLANNED)


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-ray.yml"])
def test_the_configuration_is_valid(name: str) -> None:
    run("promtool", "check", "config", name)


def test_the_alertmanagers_configuration_is_valid() -> None:
    run("amtool", "check-config", "alertmanager.yml")


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_in_a_unit_test_and_stays_silent_in_another(alert: str) -> None:
    cases = [
        case
        for test in UNIT_TESTS
        for case in test.get("alert_rule_test", ())
        if case["alertname"] == alert
    ]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


@pytest.mark.parametrize("record", sorted(RECORDED))
def test_a_recording_rule_is_computed_in_a_unit_test(record: str) -> None:
    expressions = [case["expr"] for test in UNIT_TESTS for case in test.get("promql_expr_test", ())]
    assert any(record in expression for expression in expressions)


@pytest.mark.parametrize("alert", ALERTS)
def test_operators_are_told_what_to_do(alert: str) -> None:
    """A section of docs/operations.md: symptom, metric, cause, action."""
    text = (ROOT / "docs" / "operations.md").read_text()
    match = re.search(rf"^### {alert}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"docs/operations.md has no section on {alert}"
    for part in ("Symptom", "Metric", "Cause", "Action"):
        assert f"**{part}.**" in match[1], f"{alert}: {part} is missing"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_rules_use_metrics_that_there_are(rule: dict[str, Any]) -> None:
    names = set(re.findall(r"\belastic_ft[a-z_]*(?::[a-z0-9_]+)*", rule["expr"]))
    names = {re.sub(r"_bucket$", "", name) for name in names} - {"elastic_ft"}
    assert names <= SERVED | RECORDED
