"""A controller that ends by an exception: its journal has the reason, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.errors import UsageError
from elastic_ft.observe.lines import parse_lines
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.runtime.controller import Controller
from elastic_ft.runtime.local import LocalHost
from elastic_ft.storage.store import open_store
from tests.runtime.test_publisher import JOB


class Unstartable(LocalHost):
    def start(self, *_: Any) -> None:
        raise ZeroDivisionError("no worker can be\nstarted")


def test_the_reason_reaches_a_remote_folder(tmp_path: Path) -> None:
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    controller = Controller(JOB, Unstartable({"n0": 1}), folder, f"{tmp_path}/checkpoints")
    with pytest.raises(ZeroDivisionError):
        controller.run()
    events = parse_lines(open_store(folder.url).get("events.jsonl"), "events.jsonl")
    assert events[-1]["event"] == "controller_failed"
    assert events[-1]["reason"] == "ZeroDivisionError: no worker can be started"
    assert not folder.path.exists()
    again = RunFolder(folder.url)
    assert again.take_over("next", JOB.name) == (controller.run_id,), "what it left is looked for"
    again.close()


def test_two_jobs_with_one_checkpoint_url_are_refused(tmp_path: Path) -> None:
    url = f"{tmp_path}/checkpoints"
    first = Controller(JOB, Unstartable({"n0": 1}), RunFolder(f"{tmp_path}/one"), url)
    with pytest.raises(ZeroDivisionError):
        first.run()
    other = JOB.model_copy(update={"name": "other"})
    second = Controller(other, Unstartable({"n0": 1}), RunFolder(f"{tmp_path}/two"), url)
    with pytest.raises(UsageError, match=r"checkpoints is job 'job''s .*, not 'other''s"):
        second.run()
    first._publisher.claim.check()


class Away:
    """A backend that no operation reaches."""

    def __getattr__(self, name: str) -> Any:
        def refused(*_: Any, **__: Any) -> Any:
            raise ConnectionError("refused")

        return refused


def test_a_checkpoint_store_that_is_away_for_too_long_suspends_the_job(tmp_path: Path) -> None:
    elastic = JOB.elastic.model_copy(update={"suspend_timeout_s": 0.1})
    job = JOB.model_copy(update={"elastic": elastic})
    folder = RunFolder(f"{tmp_path}/run")
    controller = Controller(job, Unstartable({"n0": 1}), folder, f"{tmp_path}/checkpoints")
    away: Any = Away()
    controller._publisher._store.backend, controller._publisher._store.attempts = away, 1
    result = controller.run()
    assert result["status"] == "suspended", result
    assert "ConnectionError: refused" in result["reason"]


def test_a_job_that_is_refused_writes_nothing_into_the_others_folder(tmp_path: Path) -> None:
    folder = RunFolder(f"{tmp_path}/run")
    folder.take_over("run1", "other")
    folder.journal(1.0, "started", 0, "the job that it is", {})
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    refused = Controller(
        JOB, Unstartable({"n0": 1}), RunFolder(folder.url), f"{tmp_path}/checkpoints"
    )
    with pytest.raises(UsageError, match="is job 'other''s"):
        refused.run()
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    folder.close()
