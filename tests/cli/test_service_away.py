"""Commands for the service where none answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ft.cli.app import BAD_USAGE, FAILED, run_command
from elastic_ft.service import service_client


@pytest.fixture
def nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which nobody answers, and that nobody has named."""
    monkeypatch.delenv(service_client.VARIABLE, raising=False)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        monkeypatch.setattr(service_client, "DEFAULT_URL", url)
        yield url


def waits(seconds: float) -> None:
    raise AssertionError(f"a rest of {seconds:g} s")


@pytest.mark.parametrize("command", [["jobs"], ["logs", "a-1", "--follow"]])
def test_nobody_is_waited_for_whom_nobody_has_named(
    nobody: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.setattr(service_client.time, "sleep", waits)
    assert run_command(command) == FAILED
    assert f"elastic-ft: no service answers at {nobody}: " in capfd.readouterr().err


@pytest.mark.parametrize(
    "command", [["stop", "a-1"], ["status", "a-1"], ["resize", "a-1", "--workers", "2"]]
)
def test_what_may_be_a_job_is_not_called_a_bad_folder_alone(
    nobody: str, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run_command(command) == BAD_USAGE
    said = f"elastic-ft: a-1: not a run folder, and no service answers at {nobody}: "
    assert capfd.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", [["jobs"], ["logs", "a-1", "--follow"]])
def test_a_named_service_is_waited_for_with_a_line(
    nobody: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    for name in ("TOLD_S", "AGAIN_S"):
        monkeypatch.setattr(service_client, name, 0.0)
    monkeypatch.setattr(service_client, "AWAY_S", 0.1)
    assert run_command([*command, "--service", nobody]) == FAILED
    waiting, failed = capfd.readouterr().err.splitlines()
    assert waiting == f"waiting for the service at {nobody}, 0.1 s at most"
    assert failed.startswith(f"elastic-ft: no service answers at {nobody}: ")
