"""``elastic-ft status`` of a run folder; of a job, by its id: tests/oneproc/test_service*.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.observe import alive

JOURNAL = Path(__file__).parents[1] / "observe/journals/kill_and_stop/events.jsonl"


def status_of(run: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    assert run_command(["status", str(run), *more]) == COMPLETED
    return capfd.readouterr().out


def test_how_a_run_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    *lines, finished = JOURNAL.read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(lines))
    alive.leave_sign(tmp_path, in_charge=True)
    said = status_of(tmp_path, capfd)
    formed = [line for line in map(json.loads, lines) if line["event"] == "generation_formed"]
    world = formed[-1]["world_size"]
    assert ": running\nstep " in said, "why its world is as it is, is no reason to be running"
    assert said.count("  rank ") == world and f"\n{world} worker" in said
    assert json.loads(status_of(tmp_path, capfd, "--json"))["workers"]["now"] == world
    sign = json.loads((tmp_path / alive.NAME).read_text())
    (tmp_path / alive.NAME).write_text(json.dumps(sign | {"at_s": sign["at_s"] - 1e5, "pid": 1}))
    assert ": dead\nno controller is alive: its last sign of life was " in status_of(
        tmp_path, capfd
    )
    (tmp_path / "events.jsonl").write_text("".join([*lines, finished]))
    said = status_of(tmp_path, capfd)
    assert f": completed\n{json.loads(finished)['reason']}\n" in said
    assert "  rank " not in said


def test_who_waits_has_no_rank_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After a restart, and spares: neither rank nor pid is known of who is no member."""
    *lines, finished = JOURNAL.read_text().splitlines(keepends=True)
    at = json.loads(finished)
    del at["status"]
    started = at | {"event": "job_started", "step": 5, "reason": "resuming"}
    ready = at | {"event": "worker_ready", "worker": "w9", "node": "n7", "reason": "up and warm"}
    formed = [line for line in map(json.loads, lines) if line["event"] == "generation_formed"]
    world = formed[-1]["world_size"]
    alive.leave_sign(tmp_path, in_charge=True)
    (tmp_path / "events.jsonl").write_text("".join([*lines, json.dumps(ready) + "\n"]))
    said = status_of(tmp_path, capfd)
    assert said.count("  rank ") == world and "None" not in said
    assert "\n  w9 on n7: ready\n" in said
    after = [started, ready | {"seq": at["seq"] + 1}]
    lines += [json.dumps(line) + "\n" for line in after]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    said = status_of(tmp_path, capfd)
    assert ": starting\nresuming\n" in said and "  rank " not in said and "None" not in said
    assert "\n0 workers\n  w9 on n7: ready\n" in said
    assert json.loads(status_of(tmp_path, capfd, "--json"))["workers"]["now"] == 0


def test_what_is_no_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", str(tmp_path)]) == BAD_USAGE
    assert capfd.readouterr().err == f"elastic-ft: {tmp_path}: not a run folder: no events.jsonl\n"
