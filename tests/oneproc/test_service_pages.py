"""Lists of jobs, a page at a time; and what a client makes of answers that are none."""

from __future__ import annotations

import json
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.errors import ConfigError
from elastic_ft.service import service_client, views
from elastic_ft.service.access import Rights, new_token
from elastic_ft.service.service_client import Client, ServiceAway
from tests.oneproc.served import JOB, WAIT_S, Served

QUEUES = ("default", "research")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "F")
    yield served
    served.close()


def submitted(client: Client, count: int) -> list[str]:
    """So many; every third one is stopped, the queues take turns."""
    ids = [client.submit(JOB, queue=QUEUES[number % 2])["id"] for number in range(count)]
    for job in ids[::3]:
        client.stop(job)
    return ids


def asked(served: Served, query: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{served.url}/api/v1/jobs{query}", timeout=WAIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_pages_are_the_whole_list_each_job_once(served: Served) -> None:
    client = served.client()
    ids = submitted(client, 8)
    live = [job for job in ids if job not in ids[::3]]

    def told(query: str) -> tuple[list[str], bool | None]:
        found = asked(served, query)
        return [job["id"] for job in found["jobs"]], found.get("more")

    assert told("") == (live, None) and told("?all=1") == (ids, None)  # as it always was
    assert told("?all=1&limit=3") == (ids[:3], True)
    assert told(f"?all=1&limit=3&after={ids[2]}") == (ids[3:6], True)
    assert told(f"?all=1&limit=3&after={ids[4]}") == (ids[5:], False)
    assert told("?all=1&limit=3&before=") == (ids[5:], True)
    assert told(f"?all=1&limit=3&before={ids[3]}") == (ids[:3], False)
    assert told(f"?limit=2&after={ids[3]}") == (
        [ids[4], ids[5]],
        True,
    )  # it has ended: a place all the same
    assert told(f"?after={ids[4]}") == (live[live.index(ids[4]) + 1 :], None)
    assert told("?state=stopped") == (ids[::3], None)
    assert told("?state=queued,stopped&limit=8") == (ids, False)
    for size in (1, 3, 8, 9):
        pages = list(client.job_pages(all=True, limit=size))
        assert [job["id"] for page in pages for job in page] == ids
        assert {len(page) for page in pages[:-1]} <= {size}
    assert [job["id"] for job in client.jobs(states=["queued"], limit=2, before="")] == live[-2:]


@pytest.mark.parametrize(
    ("query", "status", "line"),
    [
        ("limit=0", 422, "limit: expected a number from 1 to 1000, found '0'"),
        ("limit=1001", 422, "limit: expected a number from 1 to 1000"),
        ("limit=ten", 422, "limit: expected a number"),
        ("state=runing", 422, "state: expected some of queued, starting"),
        ("after=a-1&before=b-2", 422, "after, before: expected at most one of them"),
        ("after=nosuch", 404, "there is no job nosuch"),
    ],
)
def test_a_page_that_there_is_not_is_one_line(
    served: Served, query: str, status: int, line: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        asked(served, f"?{query}")
    assert refused.value.code == status
    assert json.loads(refused.value.read())["error"].startswith(line)


def test_a_page_is_of_what_its_reader_may_read(tmp_path: Path) -> None:
    """Nor does a cursor tell whether there is such a job."""
    files = {name: tmp_path / name for name in ("ann", "bob")}
    digests = {name: new_token(path) for name, path in files.items()}
    users = {
        "ann": Rights(digests["ann"], read=("*",), write=("*",)),
        "bob": Rights(digests["bob"], read=("research",)),
    }
    served = Served(tmp_path / "F", users)
    try:
        ids = submitted(served.client(files["ann"]), 8)
        bob = served.client(files["bob"])
        pages = list(bob.job_pages(all=True, limit=2))
        assert [[job["id"] for job in page] for page in pages] == [ids[1:4:2], ids[5:8:2]]
        with pytest.raises(ConfigError, match=f"^there is no job {ids[0]}$"):
            bob.jobs(all=True, after=ids[0])
    finally:
        served.close()


def test_the_command_prints_page_after_page(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a reason has in brackets was taken for a style: the list broke off, or words went."""
    monkeypatch.setattr(service_client, "PAGE", 3)
    monkeypatch.setenv("ELASTIC_FT_SERVICE", served.url)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(service_client, "PAGE", 3)
    client = served.client()

    def printed(*words: str) -> str:
        capfd.readouterr()
        assert run_command(["jobs", *words]) == 0
        return capfd.readouterr().out

    assert printed("--json") == "[]\n" and "priority" in printed()
    ids = submitted(client, 8)
    assert printed("--all", "--json") == json.dumps(client.jobs(all=True), indent=2) + "\n"
    text = printed("--all")
    assert [text.count(f"{job} ") for job in ids] == [1] * 8 and text.count("priority") == 3
    assert [word for word in printed("--state", "stopped").split() if word in ids] == ids[::3]
    why = "expected [red]one[/red] of [/a, /b] :smile:"
    told = views.job_view
    monkeypatch.setattr(views, "job_view", lambda *args: told(*args) | {"why": why})
    assert why in printed()


class Foreign(socketserver.ThreadingTCPServer):
    """Says ``said`` to one request after the other, the last of it to all that follow."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, *said: bytes) -> None:
        self.said, self.asked = said, list[bytes]()
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=[0.05], daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(WAIT_S)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Foreign)
        server.asked.append(self.request.recv(1 << 16))
        self.request.sendall(server.said[min(len(server.said), len(server.asked)) - 1])


def answer(content: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    size = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + content


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    """The service was killed while it sent a long list: its client ended with IncompleteRead."""
    whole = answer(b'{"jobs": []}')
    with Foreign(answer(b'{"jobs": [', 9000), whole) as server:
        assert Client(server.url).jobs() == []
        assert len(server.asked) == 2
    with Foreign(answer(b'{"jobs": [', 9000)) as server, pytest.raises(ServiceAway):
        Client(server.url, away_s=0.0).jobs()


@pytest.mark.parametrize("kind", ["events", "steps", "logs"])
@pytest.mark.parametrize("sent", [b"", b": still here\n\n", b'id: 1\ndata: {"text": "a"}\n\n'])
@pytest.mark.parametrize("breaks_off", [True, False])
def test_a_stream_that_breaks_off_each_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: str, sent: bytes, breaks_off: bool
) -> None:
    """The service answered, and so began the time for which it was waited for anew: for ever."""
    monkeypatch.setattr(service_client, "AGAIN_S", 0.01)
    length = 9000 if breaks_off else None
    with Foreign(answer(sent, length)) as server:
        client = Client(server.url, away_s=0.2)
        with pytest.raises(ServiceAway, match=r"no service answers|ends before"):
            for _ in getattr(client, kind)("a-1", follow=True):
                assert len(server.asked) < 2000, "it is asked for ever"
        assert 1 < len(server.asked) < 2000


def test_a_stream_that_breaks_off_now_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the time without news that counts."""
    monkeypatch.setattr(service_client, "HELD_S", 0.0)
    monkeypatch.setattr(service_client, "AGAIN_S", 0.06)
    end = answer(b"event: end\ndata: {}\n\n")
    with Foreign(*[answer(b": still here\n\n")] * 5, end) as server:
        assert list(Client(server.url, away_s=0.1).events("a-1", follow=True)) == []
        assert len(server.asked) == 6


def test_a_jobs_events_are_told_as_a_run_folders(capfd: pytest.CaptureFixture[str]) -> None:
    """``--clock`` had no effect, ``--raw`` told no time."""
    at: dict[str, Any] = {
        "at_s": 1795521600.0,
        "generation": 1,
        "reason": "from the seed",
        "text": "of the page",
    }
    lines = [at | {"event": "job_started", "step": 0}]
    lines += [
        at
        | {
            "event": "finished",
            "status": "completed",
            "at_s": 1795521662.0,
            "reason": "because",
        }
    ]
    listed = answer(json.dumps({"events": lines}).encode())
    sent = b"".join(b"data: %s\n\n" % json.dumps(line).encode() for line in lines)
    stream = answer(sent + b"event: end\ndata: {}\n\n")
    told = {}
    for option, said in {"--clock": listed, "--raw": listed, "--follow": stream}.items():
        with Foreign(said) as server:
            assert run_command(["events", "a-1", "--service", server.url, option]) == COMPLETED
        told[option] = capfd.readouterr().out.splitlines()
    assert told["--clock"][-1] == "2026-11-24 12:01:02 UTC  g1    finished: because"
    assert told["--raw"][-1] == "    62.0 s  g1  finished: because"
    assert told["--follow"][0] == "seconds since 2026-11-24 12:00:00 UTC:"
    assert told["--follow"][-1] == "    62.00 s  g1    finished: because"
    assert run_command(["events", "a-1", "--service", "http://x", "--goodput"]) == BAD_USAGE
    assert "--goodput: is of a run folder" in capfd.readouterr().err


def test_a_stream_of_somebody_else_is_one_line() -> None:
    with (
        Foreign(answer(b"data: <html>\n\n")) as server,
        pytest.raises(ConfigError, match="is no service of elastic_ft"),
    ):
        list(Client(server.url, away_s=0.0).events("a-1", follow=True))


@pytest.mark.parametrize("content", [b"<html>", b"[]", b""])
def test_somebody_else_at_the_address_is_named(content: bytes) -> None:
    named = pytest.raises(ConfigError, match="is no service of elastic_ft")
    with Foreign(answer(content)) as server, named:
        Client(server.url, away_s=0.0).service()


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """The token went along, to whoever was named."""
    new_token(tmp_path / "token")
    with Foreign(answer(b"{}")) as other:
        there = f"302 Found\r\nLocation: {other.url}/api/v1/service"
        refused = pytest.raises(ConfigError, match="HTTP 302")
        with Foreign(answer(b"", status=there)) as server, refused:
            Client(server.url, token_file=tmp_path / "token", away_s=0.0).service()
        assert other.asked == []


def test_this_machines_service_is_asked_without_a_proxy(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With http_proxy set, as on many clusters, no service was found."""
    monkeypatch.setattr(urllib.request, "_opener", None)  # as in a process that begins
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Foreign(answer(b"", status="502 Bad Gateway")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert served.client().jobs() == []
        assert proxy.asked == []


@pytest.mark.parametrize("url", ["localhost:8266", "http://", "http://host:port", "ftp://host"])
def test_an_address_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="--service: expected http://host:port"):
        Client(url)
