"""The core, told the same again, decides the same: of journals of real runs that are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import COMPLETED, FAILED, run_command
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef, Holding, Keeper, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.policy import Policy
from elastic_ft.core.typed import decoder
from elastic_ft.errors import ConfigError
from elastic_ft.observe import replay
from elastic_ft.observe.journal import EVENTS
from elastic_ft.observe.journal_text import goodput, story, summary
from elastic_ft.observe.run_folder import read_lines
from tests.observe.undeclared import undeclared

KEPT = Path(__file__).parent / "journals"
JOURNALS = sorted(path.name for path in KEPT.iterdir() if path.is_dir())
HAPPENED = {
    "kill_and_stop": {"worker_lost", "worker_hung", "worker_joined", "diagnosis"},
    "drain_and_suspend": {"node_draining", "node_lost", "suspended"},
    "user_error_and_restart": {"worker_raised", "stop_requested"},
}


@pytest.mark.parametrize("name", JOURNALS)
def test_a_kept_journal_is_decided_the_same(name: str) -> None:
    """Where this fails on purpose: python -m tests.observe.record_journals."""
    verdict = replay.check_replay(KEPT / name, exact=False)
    assert verdict.difference == ""
    assert verdict.decisions > 15


@pytest.mark.parametrize("name", JOURNALS)
def test_a_kept_journal_is_of_what_it_is_kept_for(name: str) -> None:
    lines = read_lines(KEPT / name / "events.jsonl")
    assert list(undeclared(lines)) == []
    happened = {line["event"] for line in lines}
    assert happened >= HAPPENED[name] | {"generation_formed", "recovered", "finished"}


def altered(tmp_path: Path, name: str, change: Any) -> Path:
    """A kept journal in which the inbox is not what it was."""
    folder = tmp_path / name
    shutil.copytree(KEPT / name, folder)
    lines = change(read_lines(folder / "inbox.jsonl"))
    (folder / "inbox.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_journal_that_is_not_what_happened_is_found_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def without_the_loss(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line["type"] not in ("WorkerLost", "CollectiveFailed")]

    folder = altered(tmp_path, "kill_and_stop", without_the_loss)
    assert replay.check_replay(folder, exact=False).difference
    assert run_command(["replay", str(folder)]) == FAILED
    assert "equal decisions" in capfd.readouterr().err


def killed(folder: Path, decided_last: int, told_last: int) -> Path:
    """user_error_and_restart, as if its first start had been killed: of the journal there is what
    was decided up to that line, of the inbox so many lines of that start."""
    shutil.copytree(KEPT / "user_error_and_restart", folder)
    events, inbox = (read_lines(folder / f"{name}.jsonl") for name in ("events", "inbox"))
    again = next(line["seq"] for line in events[2:] if line["event"] == "metrics_served")
    lost = again - 1 - decided_last
    begin = next(i for i, line in enumerate(inbox) if line.get("seq") == again)

    def earlier(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"seq": line["seq"] - lost} if "seq" in line else line

    events = [*events[: decided_last + 1], *map(earlier, events[again:])]
    inbox = [*inbox[:told_last], *map(earlier, inbox[begin:])]
    for name, lines in (("events", events), ("inbox", inbox)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_a_kill_tore_off_at_a_starts_end_is_no_difference(tmp_path: Path) -> None:
    """All processes killed under s3://: the inbox was uploaded, and the journal not yet."""
    folder = killed(tmp_path / "journal", decided_last=16, told_last=47)
    verdict = replay.check_replay(folder, exact=False)
    assert (verdict.difference, verdict.torn) == ("", 1)
    folder = killed(tmp_path / "inbox", decided_last=17, told_last=40)
    verdict = replay.check_replay(folder, exact=False)
    assert verdict.difference == "" and verdict.torn > 0


def test_what_is_missing_of_a_start_that_ended_well_is_a_difference(tmp_path: Path) -> None:
    folder = killed(tmp_path / "run", decided_last=16, told_last=48)
    assert "the core alone has" in replay.check_replay(folder, exact=False).difference


def test_a_run_of_a_version_before_policies_were_recorded_is_refused(tmp_path: Path) -> None:
    def without_policy(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line["type"] != "Policy"]

    with pytest.raises(ConfigError, match="does not begin with the policy"):
        replay.check_replay(altered(tmp_path, "drain_and_suspend", without_policy))


def test_a_line_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="SomethingNew"):
        list(replay.parse_inbox([{"type": "SomethingNew", "at_s": 1.0}]))


@pytest.mark.parametrize(
    "value",
    [
        Policy(1, 4, strategy="fsdp", checkpoint_every_s=30.0),
        ev.KeeperReady(1.5, Keeper("n1", ("127.0.0.1", 80))),
        ev.Paused(1.0, "w", 2, (Holding(3, "pp1.s2.tp1", "pp0.s1.tp0", Tier.PEER),)),
        ev.ShardsWritten(1.0, "w", 2, 3, ({"path": "p"},), {"a": ("fp32", (2, 3))}),
        ev.JobStarted(1.0, (CheckpointRef(4, "file:///x"),), 7),
        Layout(dp_shard=3, tp=2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_keeps_comes_back_whole(value: Any) -> None:
    from dataclasses import asdict

    assert decoder(type(value))(json.loads(json.dumps(asdict(value)))) == value


# --------------------------------------------------------------------------------- the story


@pytest.mark.parametrize("name", JOURNALS)
def test_the_story_has_a_line_for_each_happening(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = read_lines(KEPT / name / "events.jsonl")
    assert run_command(["events", str(KEPT / name)]) == COMPLETED
    told = capfd.readouterr().out.splitlines()
    happenings = [line for line in told if " s  g" in line[:20]]
    assert len(happenings) == sum(EVENTS[line["event"]].full is not None for line in lines)
    text = "\n".join(told)
    assert "recovered from" in text
    assert "finished: " in text
    if "diagnosis" in HAPPENED[name]:
        assert "who stood where: " in text
        assert "engines/native.py" in text  # a stack


def test_goodput_is_told_class_by_class(capfd: pytest.CaptureFixture[str]) -> None:
    classes = replay.account(KEPT / "kill_and_stop", 1, 3).as_dict()
    rows = list(goodput(classes))
    assert len(rows) == 2 + len(classes["classes"])
    shares = [float(row.split("s")[1].split("%")[0]) for row in rows[1:-1]]
    assert sum(shares) == pytest.approx(100.0, abs=1.0)
    assert "productive_step" in rows[1]


def test_a_finished_run_is_summed_up() -> None:
    recovery = {"paused_s": 0.5, "steps_lost": 1, "steps_redone": 2}
    result = {"status": "completed", "steps": 9, "wall_s": 3.0, "generations": 2, "goodput": 0.4}
    seconds = {"goodput_per_allocated": 0.5, "goodput_per_available": 0.25}
    result |= {"recoveries": [recovery], "worker_seconds": seconds}
    told = list(summary(result))
    assert told == [
        "completed: 9 steps in 3.0 s, 2 generations, 1 recovery",
        "paused 0.50 s in all, 1 step lost, 2 redone",
        "goodput 40.0% of the wall clock, 50.0% of allocated worker time, 25.0% of available",
    ]
    begun_again = next(summary(result, starts=3))  # what was before is not in result.json
    assert begun_again == "completed: 9 steps; the last of 3 starts took 3.0 s, 1 recovery"


def test_an_event_that_no_one_has_words_for_is_told_by_its_reason() -> None:
    line = {"event": "something", "generation": 3, "reason": "because"}
    assert list(story(line, 1.5)) == ["     1.50 s  g3    something: because"]
