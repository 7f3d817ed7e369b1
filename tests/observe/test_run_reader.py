"""A run folder reads the same under a path and under a URL of a store, whole or in segments."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.core.invariants import Expected
from elastic_ft.errors import ConfigError
from elastic_ft.observe.run_reader import RunReader

KEPT = Path(__file__).parent / "journals" / "kill_and_stop"


@pytest.fixture
def remote() -> str:
    """The kept run under the URL of a store, its journal cut into a segment and a tail."""
    url = "memory://run_reader"
    fs = fsspec.filesystem("memory")
    if fs.exists("/run_reader"):
        fs.rm("/run_reader", recursive=True)
    first, second, *rest = (KEPT / "events.jsonl").read_bytes().splitlines(keepends=True)
    fs.pipe("/run_reader/segments/events.jsonl/000000000000000", first + second)
    fs.pipe("/run_reader/events.jsonl", b"".join(rest))
    fs.pipe("/run_reader/inbox.jsonl", (KEPT / "inbox.jsonl").read_bytes())
    return url


def test_a_remote_folder_has_the_lines_of_the_local_one(remote: str) -> None:
    there, here = RunReader(remote), RunReader(KEPT)
    assert len(here.events()) > 10
    assert there.events() == here.events()
    assert there.inbox() == here.inbox()
    assert (there.steps(), there.ledger(), there.result()) == ([], None, {})
    expected = Expected()
    assert there.violations(expected) == here.violations(expected)


def test_a_remote_run_is_told_and_decided_again(
    remote: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["events", str(KEPT)]) == COMPLETED
    here = capfd.readouterr().out
    assert run_command(["events", remote]) == COMPLETED
    assert capfd.readouterr().out == here
    codes = [run_command(["replay", url]) for url in (str(KEPT), f"{KEPT}/events.jsonl", remote)]
    shown = capfd.readouterr()
    lines = (shown.out + shown.err).splitlines()
    assert len(set(codes)) == 1
    assert len(lines) == 3
    assert len(set(lines)) == 1


@pytest.mark.parametrize("url", ["nowhere", "memory://nowhere"])
@pytest.mark.parametrize("command", ["events", "replay", "chaos check"])
def test_what_is_no_run_folder_is_one_line(
    url: str, command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*command.split(), url]) == BAD_USAGE
    assert capfd.readouterr().err == f"elastic-ft: {url}: not a run folder: no events.jsonl\n"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    shutil.copy(KEPT / "events.jsonl", tmp_path)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"{\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl:\d+ is not a line"):
        RunReader(tmp_path).events()
