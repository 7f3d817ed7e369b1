"""Who has only the interface's description: nothing of what that one may send does any harm."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elastic_ft.errors import ConfigError
from elastic_ft.service.access import Rights, new_token, read_token
from elastic_ft.service.service_client import Client
from tests.oneproc.test_service_alone import JOB, Served
from tests.oneproc.test_service_strangers import JOBS, ask

YAML = (
    "name: tiny\nsteps: 10\nmodel: {preset: decoder-1m}\ndata: {url: 'stdlib:'}\n"
    "optimizer: {name: adamw, kwargs: {x: %s}}\n"
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


# ------------------------------------------------------------------- what JSON does not have


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("NaN", "not JSON: NaN is no value of JSON"),
        ("-Infinity", "not JSON: -Infinity is no value of JSON"),
        ("1e999", "optimizer.kwargs.x: this can't be sent as JSON: the number inf"),
        ('["a", "\\ud800"]', "optimizer.kwargs.x.1: this can't be sent as JSON: a text with"),
        ('"a\\u0000b"', "optimizer.kwargs.x: this can't be sent as JSON: a text with"),
        ('{"\\ud800": 1}', "optimizer.kwargs.x.?: this key can't be sent as JSON"),
        ("1" + "0" * 4000, "optimizer.kwargs.x: this can't be sent as JSON: a number of very"),
        ("1" + "0" * 5000, "not JSON: "),
        ("[" * 10_000 + "]" * 10_000, "not JSON: "),
        ("[" * 500 + "]" * 500, "job: more than 100 levels"),
    ],
)
def test_a_job_that_is_no_json(served: Served, value: str, line: str) -> None:
    """It was another job than was asked for, or a fault of the service's own, for all who had
    asked at that moment."""
    job = json.dumps(JOB | {"optimizer": {"name": "adamw", "kwargs": {"x": 0}}})
    body = f'{{"job": {job.replace("0}", f"{value}}}")}}}'.encode()
    status, said, _ = ask(served, "POST", JOBS, body)
    assert (status, said[: len(line)]) == (422, line)
    assert "\n" not in said and len(said) < 300
    assert served.client().jobs(all=True) == []


@pytest.mark.parametrize(
    "value", [".nan", "2026-01-31", "!!set {a}", "!!binary gIGC", "0x" + "f" * 5000, '"\\0"']
)
def test_a_job_of_yaml_that_json_has_not(served: Served, tmp_path: Path, value: str) -> None:
    status, said, _ = ask(served, "POST", JOBS, json.dumps({"job": YAML % value}).encode())
    assert status == 422 and "optimizer.kwargs.x: this can't be sent as JSON" in said, said
    path = tmp_path / "job.yaml"
    path.write_text(YAML % value)
    with pytest.raises(ConfigError, match=r"JSON|digits") as refused:
        Client(served.url, away_s=0.0).submit(path)
    assert "\n" not in str(refused.value)
    assert served.client().jobs(all=True) == []


def test_a_request_is_a_text(served: Served) -> None:
    for request in ("\ud800", "a\0b"):
        body = json.dumps({"job": JOB, "request": request}).encode()
        status, said, _ = ask(served, "POST", JOBS, body)
        assert (status, said) == (422, "request: expected a text of 1 to 100 characters")


# ------------------------------------------------------------------------------- HTTP's manners


def head_of(served: Served, verb: str, path: str, **headers: str) -> http.client.HTTPResponse:
    where = urlsplit(served.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20.0)
    connection.request(verb, path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def test_who_asks_for_the_head_alone_is_answered(served: Served) -> None:
    """Of a stream it was answered and then followed: nobody else was served on that connection."""
    job = served.client().submit(JOB)["id"]
    one = f"{JOBS}/{job}"
    for path in ("/", f"/jobs/{job}", "/page/page.js", "/metrics", "/api/v1/service", JOBS, one):
        answer = head_of(served, "HEAD", path)
        assert answer.status == 200 and int(answer.headers["Content-Length"]) > 0, path
    for kind in ("events", "steps", "logs"):
        answer = head_of(served, "HEAD", f"{one}/{kind}")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream"), kind
    assert head_of(served, "HEAD", f"{JOBS}/nosuch").status == 404
    where = urlsplit(served.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20.0)
    for verb, path in (("HEAD", f"{one}/events"), ("GET", one)):
        connection.request(verb, path)
        assert connection.getresponse().read().startswith(b"{" if verb == "GET" else b"")
    connection.close()


def test_a_scheme_is_written_as_one_likes(tmp_path: Path) -> None:
    """RFC 9110, 11.1. What is no bearer's token is put in no cookie."""
    digest = new_token(tmp_path / "ann")
    token, served = read_token(tmp_path / "ann"), Served(tmp_path / "F", {"ann": Rights(digest)})
    try:
        for said in ("Bearer", "bearer", "BEARER", "Bearer "):
            bearer = {"Authorization": f"{said} {token}"}
            assert head_of(served, "GET", JOBS, **bearer).status == 200, said
            cookie = head_of(served, "POST", "/api/v1/login", **bearer).headers["Set-Cookie"]
            assert cookie.startswith(f"elastic_ft_token={token};")
        for said in (f"Basic {token}", token, "Bearer", ""):
            assert head_of(served, "GET", JOBS, Authorization=said).status == 401, said
        known = {"Cookie": f"elastic_ft_token={token}", "Authorization": "Basic YTpi"}
        answer = head_of(served, "POST", "/api/v1/login", **known)
        assert (answer.status, answer.headers["Set-Cookie"]) == (200, None)
    finally:
        served.close()


def test_flags_of_an_address_are_yes_or_no(served: Served) -> None:
    """``all=false`` listed all jobs, and ``follow=false`` never ended."""
    client = served.client()
    job = client.submit(JOB)["id"]
    client.stop(job)
    for said, listed in (
        *((said, []) for said in ("?all=0", "?all=false", "?all=No", "?all=", "")),
        *((said, [job]) for said in ("?all=1", "?all=true", "?all=YES", "?all=0&all=1")),
    ):
        found = client._call("GET", f"jobs{said}")["jobs"]
        assert [each["id"] for each in found] == listed, said
    live = client.submit(JOB)["id"]
    for said in ("0", "false", "no"):
        found = Client(served.url, away_s=0.0)._call(
            "GET", f"jobs/{live}/events?follow={said}", timeout_s=20.0
        )
        assert found == {"events": []}
    for path, line in (
        (f"{JOBS}?all=2", "all: expected 1 or 0, found '2'"),
        (f"{JOBS}/{live}/steps?follow=nope", "follow: expected 1 or 0, found 'nope'"),
    ):
        assert ask(served, "GET", path)[:2] == (422, line)
