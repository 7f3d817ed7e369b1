"""A run folder that something happened to is refused by name, or read as far as it is whole."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.cli.app import run_command
from elastic_ft.errors import ConfigError, ElasticError, Superseded
from elastic_ft.observe import run_folder
from elastic_ft.observe.lines import parse_lines
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import last_generation
from elastic_ft.storage.store import open_store
from tests.observe.test_replay import KEPT

FILES = ("events.jsonl", "steps.jsonl", "inbox.jsonl")


def written(path: Path) -> RunFolder:
    folder = RunFolder(str(path))
    folder.take_over("old", "job")
    for step in (1, 2, 3):
        fields = {"world_size": 2, "step": step, "members": []}
        folder.journal(1.0, "rolled_back", step, "because", fields)
        folder.record_inbox({"type": "Noted", "at_s": 1.0, "seq": step - 1})
        folder.record_step({"step": step, "generation": 1, "loss": 1.0}, None)
    folder.close()
    return folder


def start(path: Path) -> tuple[int, int]:
    folder = RunFolder(str(path))
    folder.take_over("new", "job")
    folder.repair()
    folder.truncate(folder.last_step())
    return folder.last_step(), last_generation(path / "events.jsonl")


DAMAGE: dict[str, Any] = {
    "torn": lambda lines: [*lines[:2], lines[2][:-9]],
    "zeros at its end": lambda lines: [*lines[:2], b"\0" * 20],
    "torn inside": lambda lines: [lines[0], lines[1][:10] + b"\n", lines[2]],
    "zeros inside": lambda lines: [lines[0], b"\0" * 20 + b"\n", lines[2]],
    "no keys": lambda lines: [*lines, b"{}\n"],
    "a list": lambda lines: [*lines, b"[]\n"],
    "null": lambda lines: [*lines, b"null\n"],
    "not text": lambda lines: [lines[0], b'{"step": 2, "x": "\xff"}\n', lines[2]],
    "deep": lambda lines: [*lines, b"[" * 100_000 + b"\n"],
    "words for numbers": lambda lines: [
        *lines,
        b'{"step": "x", "generation": null, "event": "x"}\n',
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_or_read_as_far_as_it_is_whole(
    tmp_path: Path, name: str, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    path = tmp_path / name
    path.write_bytes(b"".join(DAMAGE[damage](path.read_bytes().splitlines(keepends=True))))
    if damage in ("torn", "zeros at its end"):
        assert start(tmp_path) == (2 if name == "steps.jsonl" else 3, 2 + (name != "events.jsonl"))
    elif name == "inbox.jsonl":
        assert start(tmp_path) == (3, 3)  # nobody reads it but replay
    else:
        with pytest.raises(ConfigError, match=rf"{name}:\d is not a line that a run") as told:
            start(tmp_path)
        assert "\n" not in str(told.value)
    for command in ("events", "replay"):
        code = run_command([command, str(tmp_path)])  # never a traceback
        said = capfd.readouterr().err
        assert code == 0 or said.count("\n") == 1, said


def test_mutated_journals_are_told_again_or_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd: list[Any] = [None, [], {}, "", 0, -1, 10**30, "x", True, float("nan"), [1], {"a": 1}]
    chance = random.Random(5)
    lines = parse_lines((KEPT / "kill_and_stop" / "inbox.jsonl").read_bytes(), "kept")
    shutil.copy(KEPT / "kill_and_stop" / "events.jsonl", tmp_path)
    refused = 0
    for _ in range(60):
        mutated = json.loads(json.dumps(lines))
        for _ in range(chance.randint(1, 3)):
            line = chance.choice(mutated)
            key = chance.choice(list(line))
            if chance.random() < 0.7:
                line[key] = chance.choice(odd)
            else:
                line.pop(key)
        text = "".join(json.dumps(line) + "\n" for line in mutated)
        (tmp_path / "inbox.jsonl").write_text(text)
        code = run_command(["replay", str(tmp_path)])
        said = capfd.readouterr().err
        assert code == 0 or said.count("\n") == 1, said
        refused += code == 2
    assert refused > 10


def test_what_is_private_is_its_owners_alone(tmp_path: Path) -> None:
    folder = written(tmp_path)
    folder.write_job({"name": "job"})
    folder.begin_inbox(1.0, {"type": "Policy"}, {})
    for name in ("job.yaml", "inbox.jsonl"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name


# ------------------------------------------------------------------------- a remote folder


@pytest.fixture
def url() -> str:
    return f"memory://t/{uuid4().hex}"


def steps(url: str) -> list[tuple[int, str]]:
    lines = parse_lines(open_store(url).get("steps.jsonl"), "steps.jsonl")
    return [(line["step"], line["who"]) for line in lines]


def test_the_second_of_two_has_a_remote_folder(url: str) -> None:
    """The first one's mirror overwrites nothing of it; and it is told."""
    first = RunFolder(url)
    assert first.take_over("run1", "job") == ()
    for step in (1, 2, 3):
        first.record_step({"step": step, "generation": 1, "who": "first"}, None)
    first._mirror()
    second = RunFolder(url)
    assert second.take_over("run2", "job") == ("run1",), "it was killed, for all that is known"
    assert second.last_step() == 3
    second.truncate(2)
    second.record_step({"step": 3, "generation": 2, "who": "second"}, None)
    first.record_step({"step": 4, "generation": 1, "who": "first"}, None)
    second._mirror()
    first._mirror()
    assert steps(url) == [(1, "first"), (2, "first"), (3, "second")]
    with pytest.raises(Superseded, match="superseded by run run2"):
        first.record_step({"step": 5, "generation": 1, "who": "first"}, None)
    first.close()
    assert not first.path.exists()
    assert steps(url) == [(1, "first"), (2, "first"), (3, "second")]
    second.close()
    third = RunFolder(url)
    assert third.take_over("run3", "job") == ("run1", "run2")
    third.write_result({"status": "completed"})
    third.close()
    fourth = RunFolder(url)
    assert fourth.take_over("run4", "job") == ("run1", "run2"), "the third ended in good order"
    fourth.close()


def test_the_mirror_sends_no_more_than_its_rate(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MIRROR_BYTES_PER_S", 10)
    folder = RunFolder(url)
    folder.take_over("run1", "job")
    folder.record_step({"step": 1, "generation": 1, "who": "x" * 1000}, None)
    assert folder.pause_s() == run_folder.MIRROR_EVERY_S
    folder._mirror()
    assert folder.pause_s() > 100
    folder._mirror()
    assert folder.pause_s() == run_folder.MIRROR_EVERY_S, "nothing was new"
    folder.close()


def test_another_jobs_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ElasticError, match=r"is of job 'job' .*, not of 'other'"):
        RunFolder(str(tmp_path)).take_over("new", "other")
    assert sorted(tmp_path.rglob("*")) == before
