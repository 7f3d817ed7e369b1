"""What a person who waits for a run sees of its steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_ft.cli import progress
from elastic_ft.cli.progress import ProgressDisplay
from elastic_ft.config import Job, parse_job

OWN = {"model": {"path": "a:b"}, "data": {"path": "a:c"}}
TEXT = {"model": {"preset": "decoder-1m"}, "data": {"url": "stdlib:"}}


def job(**sections: Any) -> Job:
    return parse_job({"name": "shown", "steps": 9, **sections})


def line(step: int, tokens: int, samples: int) -> dict[str, Any]:
    """Samples are counted from the job's start."""
    now_s = {"committed_at_s": 2.0 * step, "world_size": 1, "generation": 1}
    return {"step": step, "loss": 1.0, "tokens": tokens, "samples": samples, **now_s}


@pytest.mark.parametrize(("sections", "rate"), [(OWN, "16 samples/s"), (TEXT, "512 tokens/s")])
def test_a_rate_is_of_what_the_data_are(
    sections: dict[str, Any], rate: str, tmp_path: Path
) -> None:
    shown = ProgressDisplay(job(**sections), str(tmp_path))
    shown._recent.extend([line(1, 1024, 32), line(2, 1024, 64)])
    assert f"  {rate}  " in shown._describe(shown._recent[-1])


def test_a_rate_is_of_this_generation_alone(tmp_path: Path) -> None:
    """With the pause before it, its first step had `3 samples/s  ETA 339:35:28`."""
    shown = ProgressDisplay(job(**OWN), str(tmp_path))
    shown._recent.extend([line(1, 0, 32), line(2, 0, 64), line(9, 0, 96) | {"generation": 2}])
    assert "/s" not in shown._describe(shown._recent[-1])
    shown._recent.append(line(10, 0, 128) | {"generation": 2})
    assert "  16 samples/s  " in shown._describe(shown._recent[-1])


@pytest.mark.parametrize(("term", "has_status"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_moves_no_cursor_gets_lines(
    term: str, has_status: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rich draws nothing there: for minutes no step was shown at all."""
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, _environ={"TERM": term})
    monkeypatch.setattr(progress, "console", terminal)
    shown = ProgressDisplay(job(**TEXT), str(tmp_path))
    assert (shown._status is not None) == has_status
    shown._recent.append(line(1, 1024, 32))
    shown._show_step(shown._recent[-1], False)
    assert ("step 1/9" in file.getvalue()) != has_status
