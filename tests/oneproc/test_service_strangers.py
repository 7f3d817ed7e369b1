"""Whatever a stranger sends gets one line, and a status that says whose fault it is."""

from __future__ import annotations

import datetime
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from elastic_ft.errors import ConfigError
from elastic_ft.service import bodies
from elastic_ft.service.handed_in import JOB_BYTES_MAX, handed_in_job
from elastic_ft.service.service_client import Client
from tests.oneproc.served import JOB, WAIT_S, Served

JSON = {"Content-Type": "application/json"}
JOBS = "/api/v1/jobs"
WHOLE = json.dumps({"job": JOB}).encode()[:-1] + b", %b}"
FULL = json.dumps(
    {"job": JOB | {"data": {"url": "stdlib:", "kwargs": {"x": "y" * 300_000}}}}
).encode()
DEEP = b"[" * 970 + b"]" * 970  # JSON that is read just so, and can't be shown


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("F"))
    assert served.client().submit(JOB)["id"] == "tiny-1"
    yield served
    assert [job["id"] for job in served.client().jobs(all=True)] == ["tiny-1"]
    served.close()


def ask(
    served: Served, verb: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str, Any]:
    """Status, line and all that is said in the head."""
    where = urlsplit(served.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=WAIT_S)
    said = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(verb, path, body, (JSON if body is not None else {}) | said)
        answer = connection.getresponse()
        line = json.loads(answer.read())["error"]
        return answer.status, line, answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        (b"{", 422, "not JSON: "),
        (b"[]", 422, "expected an object, found list"),
        (b"\xff\xfe", 422, "not JSON: "),
        (b"[" * 100_000, 422, "not JSON: "),
        (b'{"\\ud800": 1}', 422, "\ud800: unknown key"),
        (b'{"job": "\\ud800"}', 422, "job: not a text file in UTF-8"),
        (WHOLE % b'"request": ""', 422, "request: expected a text of 1 to 100"),
        (WHOLE % b'"request": 0', 422, "request: expected a text of 1 to 100"),
        (WHOLE % b'"queue": []', 422, "queue: expected a name"),
        (WHOLE % (b'"queue": "%s"' % (b"q" * 5000)), 422, "there is no queue qqq"),
        (WHOLE % b'"priority": true', 422, "priority: expected a whole number"),
        (b'{"job": "a: &a [*a]"}', 422, "job: more than"),
        (b'{"job": "a: !!python/object:os.system x"}', 422, "job: not YAML: line 1"),
        (WHOLE % (b'"priority": ' + DEEP), 422, ""),
        (FULL, 422, "job: larger than 262144 bytes as JSON"),
        (b"x" * (bodies.BODY_MAX + 1), 413, "Maximum request body size"),
    ],
)
def test_a_body_that_is_none(served: Served, body: bytes, status: int, line: str) -> None:
    found, said, _ = ask(served, "POST", JOBS, body)
    assert (found, said[: len(line)]) == (status, line)
    assert "\n" not in said and len(said) < 500


def test_a_job_is_as_large_as_it_is_sent() -> None:
    """Not as large as with its letters in ASCII, which is twice as much for Chinese ones."""
    chinese = {"url": "stdlib:", "kwargs": {"x": "\N{CJK UNIFIED IDEOGRAPH-6587}" * 60_000}}
    job = JOB | {"data": chinese}
    assert len(json.dumps(job)) > JOB_BYTES_MAX
    assert handed_in_job({"job": job}).name == "tiny"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_not_packed_as_it_says(served: Served, coding: str) -> None:
    status, said, _ = ask(served, "POST", JOBS, b'{"job": {}}', Content_Encoding=coding)
    assert status == 400 and said.startswith("the request's body can't be read: "), said


@pytest.mark.parametrize(
    ("verb", "path", "status", "line"),
    [
        ("PUT", JOBS, 405, "/api/v1/jobs: expected GET, HEAD, POST; found PUT"),
        ("DELETE", f"{JOBS}/tiny-1", 405, "/api/v1/jobs/tiny-1: expected GET, HEAD; found DELETE"),
        ("GET", f"{JOBS}/tiny-1/stop", 405, "/api/v1/jobs/tiny-1/stop: expected POST; found GET"),
        ("GET", "/api/v1/nosuch", 404, "there is nothing at /api/v1/nosuch"),
        ("GET", f"{JOBS}/", 404, "there is nothing at /api/v1/jobs/"),
        ("GET", f"{JOBS}/a%2fb", 404, "there is no"),
        ("GET", f"{JOBS}/%0a%00", 404, "there is no job"),
        ("GET", f"{JOBS}/%ff", 404, "there is no job"),
        ("GET", f"{JOBS}/%F0%9F%92%A9/events?follow=0", 404, "there is no job \U0001f4a9"),
        ("GET", f"{JOBS}/{'x' * 5000}", 404, "there is no job xxx"),
        ("GET", f"{JOBS}?limit=1&after={'x' * 5000}", 404, "there is no job xxx"),
        ("GET", f"{JOBS}?limit=0", 422, "limit: expected a number from 1 to 1000"),
        ("GET", f"{JOBS}?state=dead", 422, "state: expected some of queued"),
        ("GET", f"{JOBS}/tiny-1/steps?follow=0&after=-1", 422, "after: expected a number"),
        ("GET", f"{JOBS}/tiny-1/steps?follow=0&after=%D9%A3", 422, "after: expected a number"),
        ("GET", f"{JOBS}?limit=%EF%BC%91", 422, "limit: expected a number from 1 to 1000"),
        ("GET", "/page/..%2fservice.py", 404, ""),
    ],
)
def test_an_address_or_a_verb_that_is_none(
    served: Served, verb: str, path: str, status: int, line: str
) -> None:
    found, said, head = ask(served, verb, path)
    assert (found, said[: len(line)]) == (status, line)
    assert "\n" not in said and len(said) < 200
    assert (head["Allow"] is not None) == (status == 405)


@pytest.mark.parametrize(
    ("what", "body", "line"),
    [
        ("stop", b'{"now": 1}', "now: expected true or false"),
        ("stop", b'{"now": ' + DEEP + b"}", ""),
        ("resize", b"{}", "workers: expected a number"),
        ("resize", b'{"workers": true}', "workers: expected a number"),
        ("resize", b'{"workers": 99999999999999999999}', "tiny-1: "),
        ("priority", b'{"priority": 1.5}', "priority: expected a whole number"),
    ],
)
def test_a_change_that_makes_no_sense(served: Served, what: str, body: bytes, line: str) -> None:
    status, said, _ = ask(served, "POST", f"{JOBS}/tiny-1/{what}", body)
    assert status in (409, 422) and said.startswith(line) and "\n" not in said, said


def test_a_fault_of_its_own_is_a_line_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service, "jobs", lambda *_: 1 / 0)
    status, said, _ = ask(served, "GET", JOBS)
    assert (status, said) == (500, "a fault of the service's own: its log has more")


def test_half_a_body_is_waited_for_so_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_WITHIN_S", 0.2)
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname or "", where.port or 0), WAIT_S) as slow:
        head = "POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        said = slow.recv(1 << 16)
    assert said.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.2 s" in said


def test_a_client_says_in_one_line_what_it_can_not_send(served: Served, tmp_path: Path) -> None:
    client = Client(served.url, away_s=0.0)
    path = tmp_path / "job.yaml"
    path.write_text("name: 2026-01-01\n")
    for job, line in (
        (path, f"^{path}: not a job: Object of type date is not JSON serializable$"),
        ({**JOB, "steps": datetime.date.today()}, "^job: not a job: Object of type date"),
        ({**JOB, "steps": float}, "^job: not a job: Object of type type"),
    ):
        with pytest.raises(ConfigError, match=line):
            client.submit(job)
    lines = "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))
    path.write_text(f"a0: &a0 [x]\n{lines}")  # it would be of gigabytes
    with pytest.raises(ConfigError, match=r"more than 100000 values"):
        client.submit(path)
    for id in ("\udcff", "", "..", "a b/../c"):
        with pytest.raises(ConfigError, match=r"^there is no"):
            client.status(id)
