"""Who has only the interface's description: nothing of what that one may send does any harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ft.errors import ConfigError
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
