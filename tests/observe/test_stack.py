"""A real job, a real Prometheus, a real alertmanager: a node is killed, and operators hear of it.

Every query of every dashboard and rule is executed: an empty answer is a misspelt metric.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.free_ports import free_ports
from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.metrics import TARGETS
from elastic_ft.observe.run_folder import RunFolder
from tests.multiproc.harness import PACED, make_job
from tests.observe.conftest import tool
from tests.observe.test_rules import ALERTS, PROMETHEUS, RECORDED, RULES
from tests.waiting import until

GRAFANA = PROMETHEUS.parent / "grafana"
DEADLINE_S = 120.0
NAME = "observed"


# ------------------------------------------------------------------------------ the stack


@contextlib.contextmanager
def webhook() -> Iterator[tuple[int, queue.SimpleQueue[dict[str, Any]]]]:
    """(port, what is posted to it)."""
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, heard
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def serving(port: int, log: Path, *command: str) -> Iterator[str]:
    """Runs a server until the block ends. Yields its URL once it is ready."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=log.parent)
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        try:
            until(ready, f"{command[0]} is ready", 90)
            yield url
        finally:
            process.kill()
            process.wait(10)


def alertmanager_config(hook_port: int) -> dict[str, Any]:
    """The example, in a hurry and with its webhook here."""
    config: dict[str, Any] = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    config["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    config["receivers"][0]["webhook_configs"][0]["url"] = f"http://127.0.0.1:{hook_port}/"
    return config


def prometheus_config(targets: Path, alertmanager_port: int) -> dict[str, Any]:
    """The example, in a hurry, with its file and its alertmanager here. The rules as they are."""
    config: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    (manager,) = config["alerting"]["alertmanagers"]
    manager["static_configs"] = [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]
    (scrape,) = config["scrape_configs"]
    scrape["file_sd_configs"][0] |= {"files": [str(targets)], "refresh_interval": "1s"}
    return config


# -------------------------------------------------------------------------------- the job


@dataclass
class RunningJob:
    """A job on three plain nodes, its controller in a thread, for as long as it is wanted."""

    path: Path
    controller: Controller = field(init=False)
    host: LocalHost = field(init=False)
    result: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> RunningJob:
        job = make_job(
            "fsdp",
            steps=1_000_000,
            workers=3,
            name=NAME,
            audit=False,
            data=PACED,
            checkpoint={"every_steps": 20, "final": False},
        )
        self.host = LocalHost({f"n{i}": 1 for i in range(3)})
        folder = RunFolder(str(self.path))
        self.controller = Controller(
            job,
            self.host,
            folder,
            f"{folder.url}/checkpoints",
            faults=(PointFault("backward", "raise", rank=2, step=30),),
        )
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        self.result = self.controller.run()

    def lose_a_node(self) -> None:
        state = self.controller.state
        assert state.assignment is not None
        self.host.kill_node(state.assignment.members[1].node)

    def __exit__(self, *_: object) -> None:
        self.controller.stop("the test is over")
        self.controller.stop("at once")
        self._thread.join(90)
        assert not self._thread.is_alive()


# ------------------------------------------------------------------------------ questions


@dataclass(frozen=True)
class Asked:
    """A Prometheus at ``url``."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def series(self, expression: str) -> list[Any]:
        """Of an instant query; one that Prometheus refuses is an error with its words."""
        try:
            return list(self.get("query", query=expression)["result"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}")


def panel_queries() -> dict[str, str]:
    """ "dashboard / panel" -> query, its variables filled in. No service runs here."""
    found = {}
    for path in sorted(set(GRAFANA.glob("*.json")) - {GRAFANA / "service.json"}):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "1m").replace("$job", NAME)
                found[f"{path.stem} / {panel['title']} / {target['refId']}"] = query
    return found


def selectors(expression: str) -> list[str]:
    """The series that an alert looks at, whatever it compares them with."""
    return re.findall(r"(?:elastic_ft[a-z0-9_:]*|\bup)(?:\{[^}]*\})?", expression)


def questions() -> dict[str, str]:
    asked = panel_queries() | {f"rule {name}": name for name in RECORDED}
    for rule in RULES:
        for index, selector in enumerate(selectors(rule["expr"])):
            asked[f"{rule.get('alert', rule.get('record'))} / {index}"] = selector
    return asked


def test_an_operator_sees_everything_and_hears_of_a_lost_node(tmp_path: Path) -> None:
    prometheus, alertmanager = tool("prometheus"), tool("prometheus-alertmanager")
    ports = free_ports(2)
    with contextlib.ExitStack() as stack:
        hook_port, heard = stack.enter_context(webhook())
        job = stack.enter_context(RunningJob(tmp_path / "run"))
        config = tmp_path / "alertmanager.yml"
        config.write_text(yaml.safe_dump(alertmanager_config(hook_port)))
        stack.enter_context(
            serving(
                ports[0],
                tmp_path / "alertmanager.log",
                alertmanager,
                f"--config.file={config}",
                f"--storage.path={tmp_path / 'alerts'}",
                f"--web.listen-address=127.0.0.1:{ports[0]}",
                "--cluster.listen-address=",
            )
        )
        config = tmp_path / "prometheus.yml"
        targets = tmp_path / "run" / TARGETS
        config.write_text(yaml.safe_dump(prometheus_config(targets, ports[0])))
        url = stack.enter_context(
            serving(
                ports[1],
                tmp_path / "prometheus.log",
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'series'}",
                f"--web.listen-address=127.0.0.1:{ports[1]}",
            )
        )
        asked = Asked(url)
        until(lambda: asked.series(f'elastic_ft_loss{{job_name="{NAME}"}}'), "the job is seen")
        until(lambda: job.controller.state.recoveries, "the user's error is recovered from")
        job.lose_a_node()
        job.host.add_node("n9", 1)
        missing = questions()

        def all_answered() -> bool:
            for name, query in list(missing.items()):
                if asked.series(query):
                    del missing[name]
            return not missing

        try:
            until(all_answered, "every panel and rule has an answer")
        except AssertionError:
            pytest.fail("\n".join(f"empty: {name}: {query}" for name, query in missing.items()))
        groups = asked.get("rules")["groups"]
        evaluated = [rule for group in groups for rule in group["rules"]]
        assert len(evaluated) == len(RULES)
        assert [rule["lastError"] for rule in evaluated if rule.get("lastError")] == []
        assert {rule["health"] for rule in evaluated} == {"ok"}
        notice = heard.get(timeout=DEADLINE_S)
        while "ElasticFtNodeLost" not in {a["labels"]["alertname"] for a in notice["alerts"]}:
            notice = heard.get(timeout=DEADLINE_S)
        assert notice["groupLabels"] == {"job_name": NAME}
        (alert,) = [a for a in notice["alerts"] if a["labels"]["alertname"] == "ElasticFtNodeLost"]
        assert alert["status"] == "firing"
        assert alert["annotations"]["summary"] == f"{NAME} has lost a node"
        assert {rule["name"] for rule in evaluated if rule["type"] == "alerting"} == set(ALERTS)
    causes = [recovery["cause"] for recovery in job.result["recoveries"]]
    assert "worker_raised" in causes
    assert {"node_lost", "worker_lost"} & set(causes)
    assert json.loads(targets.read_text()) == []
