"""A run folder reads the same under a path and under a URL of a store, whole or in segments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elastic_ft.cli import show_events, to_loggers
from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.core.invariants import Expected
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.observe import segments
from elastic_ft.observe.lines import Line
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.observe.step_cursor import Cursor
from elastic_ft.service.story import JobStory
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import StoreError

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
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    may_be_a_job = command == "events" and url == "nowhere"  # its id at a service, that is
    why = ", and no service answers at " if may_be_a_job else ": no events.jsonl\n"
    assert said.startswith(f"elastic-ft: {url}: not a run folder{why}")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    shutil.copy(KEPT / "events.jsonl", tmp_path)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"{\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl:\d+ is not a line"):
        RunReader(tmp_path).events()


@pytest.fixture
def ending(remote: str) -> Callable[[int, bool], None]:
    """Has that run at a step, or at its end."""
    fs = fsspec.filesystem("memory")

    def at(step: int, has_ended: bool) -> None:
        steps = [{"step": n, "loss": 1.0, "generation": 1} for n in range(1, step + 1)]
        text = "".join(f"{json.dumps(line)}\n" for line in steps)
        fs.pipe("/run_reader/steps.jsonl", text.encode())
        if has_ended:
            fs.pipe("/run_reader/result.json", b'{"status": "completed", "reason": "done"}')

    return at


class Steps:
    """In the place of a logger. ``then``: what happens after it has written."""

    def __init__(self, then: list[Callable[[], None]]) -> None:
        self.cursor, self.seen, self._then = Cursor(), list[int](), then

    def write(self, lines: Iterable[Line]) -> int:
        self.seen += [line["step"] for line in lines]
        if self._then:
            self._then.pop(0)()
        return 0

    def close(self) -> None: ...


def test_who_looks_last_sees_all_of_a_remote_run(
    remote: str, ending: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote folder is looked at every 2 s: a run that ended in between lost its last steps, for
    who followed it for TensorBoard, and for the service, which looks no more after its end."""
    monkeypatch.setattr(to_loggers, "LOOK_S", 0.0)
    ending(2, False)
    log, story = Steps([lambda: ending(5, True)]), JobStory(remote)
    story.look()
    assert (story.committed, story.result) == (2, {})
    assert to_loggers._write(remote, "test", str(tmp_path), True, lambda reader, to: log) == 0
    assert log.seen == [1, 2, 3, 4, 5]
    story.look()
    assert story.result and story.committed == 5


def test_what_can_not_be_read_at_last_is_no_success(
    remote: str, ending: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = segments.read_segments

    def away(store: Any, name: str, *known: Any) -> Any:
        if name == "steps.jsonl":
            raise StoreError("it is away", FailureKind.UNREACHABLE)
        return read(store, name, *known)

    ending(5, False)
    log, story = Steps([]), JobStory(remote)
    monkeypatch.setattr(segments, "read_segments", away)
    with pytest.raises(StoreFailed, match="it is away"):
        to_loggers._write(remote, "test", str(tmp_path), False, lambda reader, to: log)
    ending(5, True)
    story.look()
    assert "it is away" in story.trouble and not story.result


def test_who_watches_is_told_once_what_the_next_controller_writes_anew(tmp_path: Path) -> None:
    def line(seq: int, event: str, **more: Any) -> str:
        return json.dumps({"seq": seq, "at_s": seq / 8, "generation": 1, "event": event} | more)

    def write(lines: list[str]) -> None:
        new = tmp_path / "new"
        new.write_text("".join(f"{one}\n" for one in lines))
        new.replace(tmp_path / "events.jsonl")  # another file, as RunFolder leaves it

    told = [line(0, "finished")]  # of an earlier run in the folder
    write(told)
    watch = RunReader(str(tmp_path)).follow()
    told += [line(1, "generation_formed", step=0), line(2, "rolled_back", step=0)]
    write(told)
    assert [new["seq"] for new in watch.poll()[0]] == [1, 2]
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 1, "generation": 1}) + "\n")
    assert [step["step"] for step in watch.poll()[1]] == [1]
    write([*told, line(3, "in_charge")])
    assert [new["event"] for new in watch.poll()[0]] == ["in_charge"]
    assert watch.step == 1
    write([*told, line(3, "worker_lost", at_s=9.5)])
    assert [new["event"] for new in watch.poll()[0]] == ["worker_lost"]  # its number alone is old


def test_events_that_are_followed_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(KEPT, run)
    assert run_command(["events", str(run)]) == COMPLETED
    expected = capsys.readouterr().out
    whole = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))

    def replace(_: float) -> None:  # while the command waits for more
        (tmp_path / "new").write_bytes(whole)
        (tmp_path / "new").replace(run / "events.jsonl")

    monkeypatch.setattr(show_events.time, "sleep", replace)
    assert run_command(["events", str(run), "--follow"]) == COMPLETED
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line in expected] == expected.splitlines()
