"""The story of a run as somebody reads it at night: when, who, and nothing that is no news."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.observe import handover
from elastic_ft.observe.journal_text import brief, raw, story

NOON_S = 1795521600.0  # 2026-11-24 12:00:00 UTC
COMMON = {"at_s": NOON_S, "generation": 1, "reason": "because"}


def told(**line: object) -> str:
    return "\n".join(story(COMMON | line, 1.0)).split("  g1    ")[-1]


def test_it_says_when_that_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [COMMON | {"event": "job_started", "step": 0, "seq": 0, "reason": "from the seed"}]
    lines += [COMMON | {"event": "finished", "status": "completed", "seq": 1, "at_s": NOON_S + 62}]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run_command(["events", str(tmp_path)]) == COMPLETED
    assert capfd.readouterr().out.splitlines() == [
        "seconds since 2026-11-24 12:00:00 UTC:",
        "     0.00 s  g1    from the seed",
        "    62.00 s  g1    finished: because",
    ]
    assert run_command(["events", str(tmp_path), "--clock"]) == COMPLETED
    assert capfd.readouterr().out.splitlines()[-1] == (
        "2026-11-24 12:01:02 UTC  g1    finished: because"
    )


def test_the_same_number_asked_for_again_is_no_news() -> None:
    """The service asks so, where workers have left other places than they were told."""
    asked = {"event": "resize_requested", "workers": 1, "reason": "1 worker is wanted"}
    assert told(**asked) == told(**asked, before=3) == "resize: 1 worker is wanted"
    assert told(**asked, before=1) == brief(asked | {"before": 1}) == ""


def test_who_it_was_is_told() -> None:
    assert told(event="keeper_lost", node="n0") == "lost the keeper of node n0: because"
    assert told(event="thread_left", worker="w3") == "w3, thread_left: because"
    ready = COMMON | {"event": "worker_ready", "worker": "w3", "node": "bfa2e47c9b483aac"}
    assert raw(ready, 1.0) == "     1.0 s  g1  worker_ready w3 bfa2e47c9b48: because"


def test_what_is_over_is_no_offer() -> None:
    """A second interrupt is for who waits, and has interrupted."""
    asked = COMMON | {"event": "stop_requested", "reason": "interrupted"}
    assert brief(asked) == (
        "interrupted: the job stops after this step, with a checkpoint; "
        "a second interrupt stops it at once"
    )
    assert told(event="stop_requested") == "asked to stop: because"


def test_who_has_pressed_nothing_is_offered_nothing() -> None:
    """A console whose job was handed over said "again: at once"."""
    asked = COMMON | {"event": "stop_requested", "reason": handover.REASON}
    assert brief(asked) == (
        "the job stops after this step, with a checkpoint: another start of the job takes over"
    )


def test_what_begins_from_nothing_has_no_source() -> None:
    formed = {"event": "generation_formed", "layout": "ddp1", "step": 0, "members": [{"pid": 7}]}
    assert told(**formed, source="initial").endswith("ddp1 from step 0, initial state, pid 7")
    formed["members"] = [{"pid": 7}, {"pid": 8}]
    assert told(**formed, source="peer").endswith("from step 0, state from peer, pids 7, 8")


def test_stacks_that_look_alike_are_shown_once() -> None:
    """They differ below the frames that are shown."""
    frames = [f"file.py:{number} function" for number in range(5)]
    text = told(
        event="diagnosis",
        workers=[{"rank": 0, "stack": "a"}, {"rank": 2, "stack": "b"}, {"rank": 1, "stack": "c"}],
        stacks={"a": frames, "b": [*frames, "other.py:1 caller"], "c": frames[1:]},
    )
    assert text.count("ranks 0, 2: file.py:0") == 1
    assert text.count("rank 1: file.py:1") == 1 and text.count("\n") == 2
