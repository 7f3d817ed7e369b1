"""What commands print of the service's jobs is for a person, in a terminal or behind a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.cli.app import run_command
from elastic_ft.service import service
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service_client import VARIABLE
from tests.oneproc.served import JOB, Served


@pytest.mark.parametrize("columns", ["", "80"])  # behind a pipe, and in a terminal
def test_a_job_that_waits_is_told_in_words_and_its_id_is_whole(
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str,
) -> None:
    """Of its layout 'None' was told; ids were folded, which are to be copied, and states."""
    served = serve()
    monkeypatch.setenv(VARIABLE, served.url)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    job = served.client().submit(JOB, name="a-job-with-a-name")["id"]
    assert run_command(["status", job]) == 0
    told = capsys.readouterr().out
    assert "0 workers of 1 to " in told and "None" not in told
    assert run_command(["jobs"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if job in line]
    assert " queued " in row and (columns or "waits for 1 worker" in row)


def test_that_the_clusters_head_is_away_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that it was to start was "starting" all the while, and nothing said why."""
    monkeypatch.setattr(service, "ROUND_S", 3600.0)  # nothing is done for it

    def look() -> Sight:
        return Sight(time.monotonic() - 60.0, {"n0": 1}, {"n0": "here"})

    served = Served(tmp_path / "F", look=look)
    try:
        monkeypatch.setenv(VARIABLE, served.url)
        job = served.client().submit(JOB)["id"]
        said = "the cluster's head has not answered for 6"
        found = served.client().status(job)
        assert found["state"] == "starting" and found["why"].startswith(said), found
        assert run_command(["service", "status"]) == 0
        assert said in capsys.readouterr().out
    finally:
        served.close()
