"""Commands for the service where somebody else answers, or in a way of his own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import BAD_USAGE, FAILED, run_command
from elastic_ft.service import service_client

JOB = "name: tiny\nsteps: 10\nmodel: {preset: decoder-1m}\ndata: {url: 'stdlib:'}\n"
ASKED = (
    *(["jobs"], ["jobs", "--json"], ["status", "a"], ["logs", "a"], ["events", "a"]),
    *(["stop", "a"], ["resize", "a", "--workers", "2"], ["priority", "a", "3"]),
    *(["submit", "job.yaml", "--wait"], ["service", "status"], ["service", "stop"]),
)
FOLLOWED = (["logs", "a", "-f"], ["events", "a", "-f"])


class Somebody(ThreadingHTTPServer):
    content = b""
    length: int | None = None  # that is said; None: as it is
    status = 200
    daemon_threads = True


class Answers(BaseHTTPRequestHandler):
    server: Somebody

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content, length = self.server.content, self.server.length
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Somebody, list[str]]]:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(service_client, "AWAY_S", 0.0)
    with Somebody(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, ["--service", f"http://127.0.0.1:{server.server_address[1]}"]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[]", b"null", b"<html>", b"\xff\xfe", b"[" * 100_000),
        *(b'{"jobs": null}', b'{"jobs": {}}', b'{"jobs": [{}]}', b'{"jobs": ["x"]}'),
        b'{"id": 5, "page": null, "events": [{}], "logs": [{}], "state": "x", "slots": 5}',
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_who_is_no_service_is_said_to_be_none(
    somebody: tuple[Somebody, list[str]], content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of what a proxy, say, answers: a traceback, or a minute's wait for it to be gone."""
    server, where = somebody
    server.content = content
    for command in ASKED:
        assert run_command([*command, *where]) == BAD_USAGE, command
        out, err = capfd.readouterr()
        assert out == "" and err.endswith(f"at {where[1]} is no service of elastic_ft\n"), err
        assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"data: []\n\n", b"data: {}\n\n", b"id: x\ndata: {}\n\n"])
def test_a_stream_of_something_else_is_said_to_be_none(
    somebody: tuple[Somebody, list[str]], content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    server, where = somebody
    server.content = content
    for command in FOLLOWED:
        assert run_command([*command, *where]) == BAD_USAGE, command
        assert capfd.readouterr().err.endswith(" is no service of elastic_ft\n")


def test_an_answer_has_an_end(
    somebody: tuple[Somebody, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of one without an end all was kept in memory."""
    server, where = somebody
    server.content, server.length = b"[" * 2000, 4000  # broken off
    assert run_command(["jobs", *where]) == FAILED
    assert f"no service answers at {where[1]}: IncompleteRead(" in capfd.readouterr().err
    server.length = None
    monkeypatch.setattr(service_client, "ANSWER_MAX", 1000)
    assert run_command(["jobs", *where]) == BAD_USAGE
    assert " is no service of elastic_ft\n" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(service_client, "AWAY_S", 0.0)
    monkeypatch.setattr(service_client, "ANSWER_WITHIN_S", -1.0)
    assert run_command(["jobs", *where]) == FAILED
    assert "its answer has no end after" in capfd.readouterr().err


@pytest.mark.parametrize("status", [302, 404, 500, 502, 503, 504])
def test_a_refusal_that_is_not_ours_says_by_whom(
    somebody: tuple[Somebody, list[str]], status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """``elastic-ft: HTTP 302`` was all. A proxy whose service is away is asked again."""
    server, where = somebody
    server.status, server.content = status, b"<html>"
    away = status > 500
    for command in ("jobs", "--json"), ("logs", "a", "-f"), ("service", "status"):
        assert run_command([*command, *where]) == (FAILED if away else BAD_USAGE)
        said = (
            f"elastic-ft: no service answers at {where[1]}: HTTP {status}\n"
            if away
            else f"elastic-ft: --service: who answers at {where[1]} is no service of "
            f"elastic_ft: HTTP {status}\n"
        )
        assert capfd.readouterr().err == said
