"""The committed dashboards are what the generator makes, and name metrics that there are."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.observe.catalogue import METRICS
from elastic_ft.service.service_metrics import exposition
from elastic_ft.service.share_standing import ShareStanding
from tests.observe.conftest import tool
from tests.observe.test_rules import RECORDED

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
NAMES = ("job", "state", "nodes", "service")
OF_SERVICE = exposition(ShareStanding(), SharingTerms(), lambda queue: True).decode()
SERVED = {f"elastic_ft_{metric.name}" for metric in METRICS.values()} | set(
    re.findall(r"^(elastic_ft_service_\w+)[{ ]", OF_SERVICE, re.MULTILINE)
)


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(GRAFANA / "generate.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_dashboard_is_generated(generator: dict[str, Any], name: str) -> None:
    committed = json.loads((GRAFANA / f"{name}.json").read_text())
    assert committed == generator["build"](name), "run python deploy/grafana/generate.py"


@pytest.mark.parametrize("name", NAMES)
def test_panels_say_what_to_read_and_ask_for_what_there_is(name: str) -> None:
    board = json.loads((GRAFANA / f"{name}.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) >= 8
    for panel in panels:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            names = set(re.findall(r"\belastic_ft[a-z_]*(?::[a-z0-9_]+)*", target["expr"]))
            assert names and names <= SERVED | RECORDED, target["expr"]


def test_no_metric_of_a_fault_is_left_out() -> None:
    """What an operator looks for after a failure is on a dashboard."""
    shown = "".join((GRAFANA / f"{name}.json").read_text() for name in NAMES)
    for name in (
        *("loss", "layout_ranks", "recoveries_total", "worker_losses_total", "steps_lost_total"),
        *("checkpoints_total", "keeper_memory_bytes", "rank_pace_seconds", "state_copies"),
    ):
        assert f"elastic_ft_{name}" in shown


def test_prometheus_understands_what_the_service_s_dashboard_asks(tmp_path: Path) -> None:
    """The others are asked of a job's Prometheus in test_stack."""
    board = json.loads((GRAFANA / "service.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(asked)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "asked", "rules": rules}]}))
    command = [tool("promtool"), "check", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
