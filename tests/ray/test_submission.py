"""What a controller is started from lies in the run folder."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from trial import job

from elastic_ft.config import parse_job
from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.hosts.ray import submission
from elastic_ft.hosts.ray.submission import (
    STARTS_MAX,
    DeliveredNote,
    Starts,
    Submission,
    Submitted,
    forget_submission,
    has_begun,
    read_submission,
    write_submission,
)


def submitted(run_url: str, **trainer: Any) -> Submitted:
    values = parse_job(job("submitted"))
    url = f"{run_url}/checkpoints"
    return write_submission(Submission(values, run_url, url, "elastic_ft/j/r/", (), False, trainer))


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory:/{}"])
def test_what_is_submitted_is_read_and_forgotten(tmp_path: Path, url: str) -> None:
    run_url = url.format(tmp_path / "run")
    assert has_begun(run_url) == url.startswith("memory")
    here = submitted(run_url, train_loop=lambda: 7)
    assert has_begun(run_url)
    assert read_submission(here).trainer["train_loop"]() == 7
    if not url.startswith("memory"):
        (file,) = (tmp_path / "run").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    Starts(here).count()
    forget_submission(here)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    forget_submission(here)  # again


@pytest.mark.parametrize("url", ["{}", "memory:/{}"])
def test_what_is_delivered_is_noted_in_any_run_folder(tmp_path: Path, url: str) -> None:
    """Of one in a bucket nothing was: reports were delivered again by the next controller."""
    here = Submitted(url.format(tmp_path / "run"), "0" * 64)
    first = DeliveredNote(here)
    assert first.before() == 0
    for index in range(1, 8):
        first.note(index)
    first.close()
    assert DeliveredNote(here).before() == 7
    forget_submission(here)
    assert DeliveredNote(here).before() == 0


def test_no_folder_is_made_where_nothing_was_submitted(tmp_path: Path) -> None:
    """A controller on a machine that does not see the run folder left one there."""
    Starts(Submitted(str(tmp_path / "elsewhere"), "0" * 64)).count()
    assert not (tmp_path / "elsewhere").exists()


def test_another_submission_is_refused(tmp_path: Path) -> None:
    here = submitted(str(tmp_path))
    (tmp_path / here.name).write_bytes(b"anything else")
    with pytest.raises(JobFailed, match="not what was submitted"):
        read_submission(here)
    (tmp_path / here.name).unlink()
    with pytest.raises(JobFailed, match="can read the run folder"):
        read_submission(here)


def test_a_disk_that_is_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = submitted(str(tmp_path))
    path, aside = tmp_path / here.name, tmp_path / "aside"
    path.rename(aside)
    path.mkdir()  # what it gives is no content, and an error that may pass

    def comes_back(_: float) -> None:
        path.rmdir()
        aside.rename(path)

    monkeypatch.setattr(submission.time, "sleep", comes_back)
    assert read_submission(here).job.name == "submitted"
    path.rename(aside)
    path.mkdir()
    monkeypatch.setattr(submission, "READ_TIMEOUT_S", -1.0)
    with pytest.raises(StoreFailed, match="Is a directory"):
        read_submission(here)


def test_what_a_store_no_longer_has_is_not_asked_for_again() -> None:
    here = submitted("memory://gone/run")
    forget_submission(here)
    with pytest.raises(JobFailed, match="what was submitted is gone"):
        read_submission(here)


def test_controllers_that_end_one_after_another_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(submission.time, "time", lambda: now_s)
    here = submitted(str(tmp_path))
    for _ in range(2):
        for _ in range(STARTS_MAX):
            now_s += 10.0
            Starts(here).count()
        now_s += 60.0  # one that lives for longer
    for _ in range(STARTS_MAX):
        now_s += 10.0
        Starts(here).count()
    with pytest.raises(JobFailed, match=f"{STARTS_MAX} controllers, one after another"):
        Starts(here).count()


def test_controllers_that_commit_steps_are_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten faults in a row, nine seconds apart, ended a job whose every controller had been well."""
    now_s = 1000.0
    monkeypatch.setattr(submission.time, "time", lambda: now_s)
    here = submitted(str(tmp_path))
    for _ in range(2 * STARTS_MAX):
        now_s += 10.0
        starts = Starts(here)
        starts.count()
        starts.trained()
        starts.trained()
        starts.close()
    for _ in range(STARTS_MAX):
        now_s += 10.0
        Starts(here).count()
    with pytest.raises(JobFailed, match="no step was committed"):
        Starts(here).count()
