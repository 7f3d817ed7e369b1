"""The report of a run folder in S3 is made there."""

from __future__ import annotations

from chaos.s3_server import S3Server
from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage.store import open_store


def test_a_remote_run_is_reported_beside_its_files(s3: S3Server) -> None:
    url = s3.url("reported")
    folder = RunFolder(url)
    folder.take_over("r1", "job")
    folder.journal(1000.0, "job_started", 0, "from the seed", {"step": 0})
    step = {"step": 1, "generation": 1, "loss": 1.0, "tokens": 5, "samples": 8}
    folder.record_step(step | {"committed_at_s": 1001.0}, None)
    folder.journal(1002.0, "finished", 1, "all steps", {"status": "completed"})
    folder.close()
    assert run_command(["report", url]) == COMPLETED
    page = open_store(url).get("report.html")
    assert page.startswith(b"<!doctype html>") and b'"state":"completed"' in page
    assert b'"step":1' in page
