"""Preemption notices, from local servers that answer as the clouds' do."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.hosts.ray.cluster import wait_for
from elastic_ft.hosts.ray.notices import Metadata, NoticeWatch, cloud_here
from elastic_ft.keeper.preemption import AWS, AZURE, GCP, GCP_LEFT_S, PreemptionNotice, of_azure

WAIT_S = 30.0
END_S = 2_000_000_000.0
TOKEN = "t0ken"


class Cloud(ThreadingHTTPServer):
    """``preempts``: it says so from now on. ``down``: it answers with errors."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.preempts, self.down, self.asked, self.failed = False, False, 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, verb: str, path: str, headers: Any) -> str | None:
        self.asked += 1
        if path == "/latest/api/token" and verb == "PUT":
            return TOKEN if headers["X-aws-ec2-metadata-token-ttl-seconds"] else None
        if path == "/latest/meta-data/spot/instance-action":
            assert headers["X-aws-ec2-metadata-token"] == TOKEN
            at = datetime.fromtimestamp(END_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return json.dumps({"action": "terminate", "time": at}) if self.preempts else None
        if path == "/computeMetadata/v1/instance/preempted":
            assert headers["Metadata-Flavor"] == "Google"
            return "TRUE" if self.preempts else "FALSE"
        assert headers["Metadata"] == "true"
        if path.startswith("/metadata/instance/compute/name?"):
            return "node_1"
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        event = {
            "EventType": "Preempt",
            "Resources": ["node_0", "node_1"],
            "NotBefore": email.utils.formatdate(END_S, usegmt=True),
        }
        return json.dumps({"DocumentIncarnation": 1, "Events": [event] if self.preempts else []})


class Answers(BaseHTTPRequestHandler):
    server: Cloud

    def do_GET(self) -> None:
        self.server.failed += self.server.down
        answer = None if self.server.down else self._answer()
        self.send_response(500 if self.server.down else 404 if answer is None else 200)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_PUT = do_GET

    def _answer(self) -> str | None:
        return self.server.answer(self.command, self.path, self.headers)

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "says"), [(AWS, "AWS will terminate"), (GCP, "Google"), (AZURE, "a Preempt of this")]
)
def test_a_notice_is_passed_on_until_it_is_taken(cloud: Cloud, name: str, says: str) -> None:
    taken: list[PreemptionNotice] = []
    refusals = iter([RuntimeError("the head is away"), HTTPException("half an answer"), None])

    def drain(notice: PreemptionNotice) -> None:
        if (refused := next(refusals)) is not None:
            raise refused
        taken.append(notice)

    NoticeWatch(Metadata(name, cloud.url), drain, every_s=0.005).start()
    for cloud.down in (False, True):  # nothing is to come, whatever the server does
        asked = cloud.asked + cloud.failed
        wait_for(lambda asked=asked: cloud.asked + cloud.failed > asked + 6, WAIT_S, "it asks on")
    assert taken == []
    cloud.down, cloud.preempts = False, True
    wait_for(lambda: bool(taken), WAIT_S, "the notice")
    assert len(taken) == 1 and says in taken[0].reason
    left_s = END_S if name != GCP else time.time() + GCP_LEFT_S
    assert taken[0].deadline_s == pytest.approx(left_s, abs=WAIT_S if name == GCP else 0)


def test_events_of_other_machines_or_that_end_nothing_are_none_of_ours() -> None:
    def told(**event: Any) -> PreemptionNotice | None:
        first = {"EventType": "Preempt", "Resources": ["me"], "NotBefore": ""}
        return of_azure(json.dumps({"Events": [first | event]}), "me", 7.0)

    assert told(Resources=["another"]) is None
    assert told(EventType="Freeze") is None
    assert told() == PreemptionNotice(7.0, "Azure has scheduled a Preempt of this machine")
    with pytest.raises(ValueError, match="expected a JSON object"):
        of_azure("<html>", "me", 0.0)


def test_a_cloud_is_asked_where_the_firmware_names_it(tmp_path: Path) -> None:
    assert cloud_here("auto", tmp_path) is None
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert cloud_here("auto", tmp_path) == AWS
    assert cloud_here("none", tmp_path) is None and cloud_here("gcp", tmp_path) == GCP
