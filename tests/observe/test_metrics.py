"""What is served is what docs/metrics.md says, by name, type, unit, labels and meaning."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs import tables
from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.buddies import choose_buddies
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.faults import PointFault
from elastic_ft.observe import metrics as served
from elastic_ft.observe.accounts import CLASSES, Totals
from elastic_ft.observe.catalogue import COMMON, METRICS
from elastic_ft.observe.metrics import TARGETS, Metrics, state_copies, write_targets
from tests.multiproc.harness import make_job, run_job

BASE_UNITS = {"seconds", "bytes"}


def test_the_document_has_every_metric() -> None:
    page = (tables.DOCS / "metrics.md").read_text()
    assert page == tables.page("metrics.md"), "run python docs/tables.py"


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: Any) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit in BASE_UNITS:
        assert f"_{metric.unit}" in metric.name
    assert metric.meaning.endswith(".")


def test_what_a_run_serves_is_in_the_catalogue(tmp_path: Path) -> None:
    """Scraped over HTTP, found by the file that the run folder has for Prometheus."""
    scraped: list[str] = []

    def scrape(controller: Controller, line: dict[str, Any]) -> None:
        if line["step"] == 10:
            (group,) = json.loads((controller.run_folder.path / TARGETS).read_text())
            url = f"http://{group['targets'][0]}/metrics"
            with urllib.request.urlopen(url, timeout=30) as answer:
                scraped.append(answer.read().decode())

    job = make_job("fsdp", steps=12, workers=2)
    faults = [PointFault("backward", "raise", rank=1, step=4)]
    run = run_job(job, tmp_path / "run", faults=faults, on_step=scrape).check()
    families = list(text_string_to_metric_families(scraped[0]))
    known = {f"elastic_ft_{name}": metric for name, metric in METRICS.items()}
    served = set()
    for family in families:
        for sample in family.samples:
            name = sample.name
            if name.endswith("_created"):
                continue
            base = name if name in known else re.sub(r"_(sum|count|bucket)$", "", name)
            assert base in known, f"{name} is in no document"
            metric = known[base]
            assert set(sample.labels) - {"le"} == {*COMMON, *metric.labels}
            assert sample.labels["job_name"] == job.name
            served.add(metric.name)
    counters = {m.name for m in METRICS.values() if m.kind != "gauge" and not m.labels}
    assert served >= counters, "declared, never served"
    value = {(s.name, s.labels.get("cause")): s.value for f in families for s in f.samples}
    assert value["elastic_ft_committed_step", None] >= 9
    assert value["elastic_ft_recoveries_total", "worker_raised"] == 1
    assert value["elastic_ft_user_errors_total", None] == 1
    assert value["elastic_ft_state_copies", None] == 2
    assert json.loads((run.path / TARGETS).read_text()) == []  # it has ended


# ------------------------------------------------------------------------- each by itself


def assignment(layout: Layout, nodes: str, copies: int = 2) -> Assignment:
    members = tuple(Member(f"w{i}", node, "host", i) for i, node in enumerate(nodes))
    buddies = choose_buddies(members, layout, copies)
    source = Source(0, Tier.INITIAL)
    return Assignment(1, members, (), layout, source, buddies, "for a test")


@pytest.mark.parametrize(
    ("layout", "nodes", "copies", "expected"),
    [
        (Layout(dp_replicate=3), "abc", 1, 3),
        (Layout(dp_replicate=2), "aa", 1, 1),
        (Layout(dp_shard=4), "abcd", 2, 2),
        (Layout(dp_shard=4), "abcd", 3, 3),
        (Layout(dp_shard=4), "abcd", 1, 1),
        (Layout(dp_shard=2), "aa", 2, 1),
        (Layout(), "a", 2, 1),
    ],
)
def test_copies_of_the_state(layout: Layout, nodes: str, copies: int, expected: int) -> None:
    assert state_copies(assignment(layout, nodes, copies)) == expected


def totals(productive_s: float, wasted_s: float) -> Totals:
    classes = dict.fromkeys(CLASSES, 0.0)
    classes |= {"productive_step": productive_s, "wasted_progress_from_disruption": wasted_s}
    return Totals(1.0, 1.0, {}, classes, 1.0, 1.0)


def test_a_counter_of_worker_seconds_never_falls() -> None:
    """A roll back makes productive seconds wasted ones."""
    metrics = Metrics("job")
    seen = []
    for productive_s, wasted_s in ((5.0, 0.0), (3.0, 2.0), (4.0, 2.0), (6.0, 2.0)):
        metrics.goodput(totals(productive_s, wasted_s))
        labels = {"job_name": "job", "class": "productive_step"}
        value = metrics.registry.get_sample_value("elastic_ft_worker_seconds_total", labels)
        seen.append(value)
    assert seen == [5.0, 5.0, 5.0, 6.0]


def test_targets_are_replaced_whole(tmp_path: Path) -> None:
    write_targets(tmp_path, "127.0.0.1:1234")
    (group,) = json.loads((tmp_path / TARGETS).read_text())
    assert group == {"targets": ["127.0.0.1:1234"], "labels": {"run": tmp_path.name}}
    write_targets(tmp_path, "")
    assert json.loads((tmp_path / TARGETS).read_text()) == []


def test_ray_is_told_each_sample_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray's agent makes of it is Ray's; with ray[default] it serves them as ray_*."""
    from elastic_ft.hosts.ray import ray_metrics

    told: dict[tuple[str, str], float] = {}

    class Recorder(ray_metrics.Gauge):
        def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
            assert value is not None and tags is not None
            told[self.info["name"], ",".join(f"{k}={v}" for k, v in sorted(tags.items()))] = value
            super().set(value, tags)  # its own checks of names and tags

    monkeypatch.setattr(ray_metrics, "Gauge", Recorder)
    metrics = Metrics("job")
    metrics.event("recovered", {"cause": "x", "paused_s": 0.3, "bytes_moved": 9, "steps_redone": 1})
    before, after = (assignment(Layout(dp_replicate=n), "abc"[:n]) for n in (3, 2))
    mirror = ray_metrics.RayMetrics(metrics.registry)
    metrics.formed(before)
    mirror.mirror()
    metrics.formed(after)
    mirror.mirror()
    assert told["elastic_ft_recoveries_total", "cause=x,job_name=job"] == 1
    assert told["elastic_ft_recovery_seconds_bucket", "job_name=job,le=0.4"] == 1
    assert told["elastic_ft_layout_info", "job_name=job,layout=ddp2"] == 1
    gone = told["elastic_ft_layout_info", "job_name=job,layout=ddp3"]
    assert gone != gone  # NaN: Ray forgets no series


def test_who_asks_for_nothing_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served, "REQUEST_TIMEOUT_S", 0.1)
    metrics = Metrics("job")
    try:
        with socket.create_connection(("127.0.0.1", metrics.serve("127.0.0.1"))) as silent:
            silent.settimeout(10)
            assert silent.recv(1) == b"", "its connection is ended"
    finally:
        metrics.close()
    assert not capsys.readouterr().err, "and that is no error"
