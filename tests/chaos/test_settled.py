"""When a trial has shown enough: without any process, by what is in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chaos.runner import LOG
from chaos.scenario import load_scenario
from chaos.trial import Trial


def add_lines(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def train(run: Path, first: int, last: int) -> None:
    steps = range(first, last + 1)
    add_lines(run / "steps.jsonl", *({"step": s, "generation": 1, "world_size": 3} for s in steps))


def test_a_fault_that_is_done_late_is_waited_for(tmp_path: Path) -> None:
    """The launcher took 2 s to say who is alive; ten steps passed before the worker was killed."""
    scenario = load_scenario("launcher-killed")
    trial = Trial(scenario, "processes", tmp_path, {}, 60)
    run = tmp_path / "run"
    run.mkdir()
    formed = {"event": "generation_formed", "generation": 1, "step": 0, "members": []}
    add_lines(run / "events.jsonl", {"at_s": 0.0, "reason": "", **formed})
    train(run, 1, 50)
    add_lines(run / LOG, {"at_s": 1.0, "index": 0, "at_step": 10})
    assert not trial._has_settled()  # the second one has not fired
    train(run, 51, 60)
    add_lines(run / LOG, {"at_s": 2.0, "index": 1, "at_step": 40})
    assert not trial._has_settled()  # 60 is the first step that was seen after it
    train(run, 61, 60 + scenario.settle_steps)
    assert trial._has_settled()
