"""Who has only the interface's description: nothing of what that one may send does any harm."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import pytest

from elastic_ft.cli import service_commands
from elastic_ft.cli.app import run_command
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.service import served_at, starting
from elastic_ft.service.access import Rights, new_token, read_token
from elastic_ft.service.floods import Pace
from elastic_ft.service.local_nodes import FILE, LOG
from elastic_ft.service.served_at import bound, service_url
from elastic_ft.service.service_client import VARIABLE, Client, ServiceAway
from elastic_ft.storage.store import Store, open_store
from tests.observe.test_replay import KEPT
from tests.oneproc.served import JOB, WAIT_S, Served, told
from tests.oneproc.test_service_crowds import until
from tests.oneproc.test_service_strangers import JOBS, ask

YAML = (
    "name: tiny\nsteps: 10\nmodel: {preset: decoder-1m}\ndata: {url: 'stdlib:'}\n"
    "optimizer: {name: adamw, kwargs: {x: %s}}\n"
)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


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


# --------------------------------------------------------------------------- one who asks too much


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Served]:
    users = {name: Rights(new_token(tmp_path / name), write=("*",)) for name in ("ann", "bob")}
    served = Served(tmp_path / "F", users)
    yield served
    served.close()


def test_who_asks_too_often_is_told_when_to_ask_again(shared: Served, tmp_path: Path) -> None:
    """A script without a pause kept the service's one processor from everybody else."""
    shared.api._pace = Pace(per_s=2.0, burst=5, at_once_max=100)
    ann = {"Authorization": f"Bearer {read_token(tmp_path / 'ann')}"}

    def flood(_: int) -> tuple[int, str | None]:
        answer = head_of(shared, "GET", f"{JOBS}/nosuch", **ann)
        return answer.status, answer.headers["Retry-After"]

    with ThreadPoolExecutor(8) as pool:
        begun_s = time.monotonic()
        answers = list(pool.map(flood, range(60)))
        took_s = time.monotonic() - begun_s
        assert shared.client(tmp_path / "bob").jobs() == []
    assert set(answers) == {(404, None), (429, "1")}
    assert 5 <= answers.count((404, None)) <= 6 + 2.0 * took_s
    shared.api._pace = Pace(per_s=2.0, burst=1, at_once_max=100)
    patient = Client(shared.url, token_file=tmp_path / "ann", away_s=WAIT_S)
    for _ in range(3):
        assert patient.jobs() == []
    shared.api._pace = Pace(per_s=0.001, burst=1, at_once_max=100)
    hasty = shared.client(tmp_path / "ann")
    assert hasty.jobs() == []
    with pytest.raises(ServiceAway, match=r"^ann asks more than 0\.001 times a second: ask again"):
        hasty.jobs()


def test_who_has_much_under_way_begins_no_more(shared: Served, tmp_path: Path) -> None:
    """Bodies that never came held a connection each, for a minute, until there were none left."""
    shared.api._pace = Pace(per_s=1e6, burst=1000, at_once_max=3)
    where, token = urlsplit(shared.url), read_token(tmp_path / "ann")
    head = (
        "POST /api/v1/jobs HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n{{"
    )
    with contextlib.ExitStack() as slow:
        for _ in range(3):
            there = socket.create_connection((where.hostname or "", where.port or 0), WAIT_S)
            slow.enter_context(there).sendall(head.encode())
        until(lambda: shared.api._pace._under_way["ann"] == 3, "they are read")
        with pytest.raises(ServiceAway, match=r"^3 requests of ann's are under way already"):
            shared.client(tmp_path / "ann").jobs()
        assert shared.client(tmp_path / "bob").jobs() == []
    until(lambda: not shared.api._pace._under_way["ann"], "who is gone asks nothing")
    assert shared.client(tmp_path / "ann").jobs() == []


# ------------------------------------------------------------------------------------- addresses


class Listening(Served):
    """At ``host`` and ``port``, as the service's actor does."""

    def __init__(self, folder: Path, host: str, port: int = 0) -> None:
        self.host, self.port = host, port
        super().__init__(folder)
        self.url = service_url(host, self.port, False)

    async def _open(self) -> None:
        await self._runner.setup()
        self.port = await bound(self._runner, self.host, self.port, None, False)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_an_address_may_be_one_of_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told as http://::1:8266, which nobody finds."""
    served = Listening(tmp_path / "F", "::1")
    try:
        assert served.url.startswith("http://[::1]:")
        found = served.client().submit(JOB)
        assert found["page"] == f"{served.url}/jobs/tiny-1"
        assert run_command(["jobs", "--service", served.url]) == 0
        monkeypatch.setenv(VARIABLE, f"{served.url}/")
        assert run_command(["status", "tiny-1"]) == 0
        assert capsys.readouterr().out.count("tiny-1") > 1
        how = ["--folder", str(tmp_path / "F"), "--host", "::1", "--port", str(served.port)]
        assert run_command(["service", "start", "--local-nodes", "1", *how]) == 0
        assert f"the service runs already: {served.url}" in capsys.readouterr().out
    finally:
        served.close()


@pytest.mark.parametrize(
    "url",
    [
        *("http://::1:8266", "http://[::1", "[::1]:8266", "http://[zz]:1", "http://a b:80"),
        *("http://h\n:80", "http://\udcff:80", f"http://{'x' * 99}:1", "http://u:p@h:80"),
        *("http://h:80?x=1", "http://h:80#f", "http://h:0", "http://h:99999", "ftp://h", "h:80"),
    ],
)
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--service: expected http://host:port, found"):
        Client(url, away_s=0.0)


def test_a_port_that_is_given_up_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who started a service while the one before it ended was told that it can't be had."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr(served_at, "BIND_TIMEOUT_S", 0.5)
        with pytest.raises(UsageError, match=f"^--port: 127.0.0.1:{port} can't be had: .*in use"):
            Listening(tmp_path / "F", "127.0.0.1", port)
        monkeypatch.setattr(served_at, "BIND_TIMEOUT_S", WAIT_S)
        tried, again = threading.Event(), asyncio.sleep

        async def rests(seconds: float) -> None:
            tried.set()
            await again(seconds)

        monkeypatch.setattr(served_at.asyncio, "sleep", rests)
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(Listening, tmp_path / "F", "127.0.0.1", port)
            assert tried.wait(WAIT_S)
            holder.close()
            served = begun.result(WAIT_S)
    try:
        assert served.port == port and served.client().jobs() == []
    finally:
        served.close()


def test_what_can_not_be_waited_for_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--port: 192\.0\.2\.1:0 can't be had"):
        Listening(tmp_path / "F", "192.0.2.1")  # of nobody: RFC 5737


# ----------------------------------------------------------------------------------- two at once


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a service whose process is ``nodes_without_ray``; it ends with the test."""
    folder = tmp_path / "F"
    named = SimpleNamespace(__name__="tests.oneproc.nodes_without_ray", FILE=FILE, LOG=LOG)
    monkeypatch.setattr(starting, "local_nodes", named)
    yield folder
    started = folder / "started"
    for pid in started.read_text().split() if started.exists() else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if named.__name__ in process.cmdline():
                process.kill()
                process.wait(WAIT_S)


@pytest.mark.parametrize("port", ["0", "free"])
def test_two_starts_at_once_are_one_service(
    nodes: Path, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    """Each started nodes of its own, and one of them failed over the port, or took the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1] if port == "free" else 0

    def start() -> int:
        return service_commands.start(local_nodes=1, folder=str(nodes), port=number)

    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(start) for _ in range(2)]
        assert [each.result(WAIT_S) for each in starts] == [0, 0]
    said = capsys.readouterr().out
    assert len((nodes / "started").read_text().split()) == 1, said
    url = json.loads((nodes / FILE).read_text())["url"]
    assert f"the service runs: {url}\n" in said
    assert f"the service runs already: {url} (folder {nodes})\n" in said
    assert start() == 0
    assert f"the service runs already: {url}" in capsys.readouterr().out


def test_nodes_whose_service_is_just_gone_are_waited_for(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``service stop`` and ``service start`` after it: process 4711 has the local nodes already."""
    monkeypatch.setattr(starting, "ENDING_TIMEOUT_S", WAIT_S)
    how = ["--local-nodes", "1", "--folder", str(nodes), "--port", "0"]
    assert run_command(["service", "start", *how]) == 0
    first = json.loads((nodes / FILE).read_text())
    Client(first["url"], away_s=0.0).stop_service()  # its process goes a second later
    assert run_command(["service", "start", *how]) == 0
    assert json.loads((nodes / FILE).read_text())["pid"] != first["pid"]
    capsys.readouterr()
    Client(json.loads((nodes / FILE).read_text())["url"]).stop_service("stop")  # and it stays
    monkeypatch.setattr(starting, "ENDING_TIMEOUT_S", 0.3)
    assert run_command(["service", "start", *how]) == 2
    assert "has the local nodes of" in capsys.readouterr().err


def test_a_folder_that_can_not_be_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file/F"
    how = ["--local-nodes", "1", "--folder", str(folder), "--port", "0"]
    assert run_command(["service", "start", *how]) == 2
    assert capsys.readouterr().err == f"elastic-ft: --folder: {folder}: Not a directory\n"


# ------------------------------------------------------------------------- a store that is paid


def test_who_looks_at_a_job_that_has_ended_asks_its_store_for_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look at its page, of each who had it open, read all its files and listed two folders."""
    served = Served(f"memory://outsiders/{uuid4().hex}")
    try:
        job = served.client().submit(JOB)["id"]
        served.client().stop(job)
        store = open_store(served.service.run_url(job))
        for path in (KEPT / "kill_and_stop").iterdir():
            store.put(path.name, path.read_bytes())
        store.put("result.json", b'{"status": "completed", "reason": "done"}')
        asked = Counter[str]()
        for name in ("get", "list"):
            monkeypatch.setattr(Store, name, counting(getattr(Store, name), name, asked))
        client = served.client()
        for _ in range(20):
            assert client._call("GET", f"jobs/{job}/view")["state"] == "completed"
        assert asked["list"] <= 2 and asked["get"] <= 8 + asked["get result.json"], asked
    finally:
        served.close()


def counting(call: Callable[..., Any], name: str, asked: Counter[str]) -> Callable[..., Any]:
    def counted(store: Store, key: str = "", *more: Any) -> Any:
        if "jobs/" in store.url:
            asked.update([name, f"{name} {key}"])
        return call(store, key, *more)

    return counted


def test_who_stops_a_job_is_told_how_far_it_came(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = served.client().submit(JOB)["id"]
    told(tmp_path / "F/jobs" / job, 7)
    again = Served(tmp_path / "F")  # which reads it as it begins
    try:
        until(lambda: again.client().status(job)["step"] == 7, "it is read")
        assert run_command(["stop", job, "--service", again.url]) == 0
        until(lambda: job in again.service._ended, "it is done with")
        again.service._ended.clear()  # as that of one that ended long ago
        assert again.client().jobs(all=True)[0]["step"] == 7
    finally:
        again.close()
    assert capsys.readouterr().out == f"{job}: stopped at step 7\n"
