"""What no later checkpoint has: it is published in the end, or not at all, and no job is complete
with what can't be read."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job, parse_job
from elastic_ft.controller import publisher
from elastic_ft.controller.job_policy import policy_of
from elastic_ft.core import events as ev
from elastic_ft.errors import StoreFailed
from elastic_ft.storage.store import Store
from tests.oneproc.test_publisher import DEADLINE_S, JOB, Publishing, Unread

OWN = parse_job({"name": "job", "loop": {"script": "train.py"}, "checkpoint": {"keep_last": 1}})


class NoManifests:
    """A backend that takes all but manifests, until it is told that it does."""

    def __init__(self, store: Store) -> None:
        self._backend, self.is_away = store.backend, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        if self.is_away and key.startswith("manifests/"):
            raise StoreFailed("503 Slow Down")
        return bool(self._backend.create(key, data, timeout_s))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "AGAIN_S", 0.01)


def publishing(tmp_path: Path, job: Job = JOB) -> Publishing:
    return Publishing(str(tmp_path), "run1", job=job)


def away(one: Publishing) -> NoManifests:
    backend: Any = NoManifests(one.store)
    one.publisher._store.backend = backend
    return backend


def test_the_newest_of_a_loop_of_the_users_may_be_its_last(tmp_path: Path) -> None:
    """It ends where it likes: the manifest of its last step was given up at once."""
    one = publishing(tmp_path, OWN)
    store = away(one)
    assert "step 3 is the last so far, and is published once" in one.commit(3).reason
    store.is_away = False
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    assert one.steps() == [3]
    one.publisher.close()


def test_one_that_has_a_later_one_is_given_up(tmp_path: Path) -> None:
    one = publishing(tmp_path, OWN)
    away(one)
    assert "step 3 is the last so far" in one.commit(3).reason
    outcomes = [one.commit(5), one.posted.get(timeout=DEADLINE_S)]
    (failed,) = [each for each in outcomes if isinstance(each, ev.CheckpointFailed)]
    assert failed.step == 3
    one.publisher.close()


@pytest.mark.parametrize(("job", "step"), [(JOB, JOB.steps), (OWN, 3)])
def test_who_is_asked_to_stop_tries_no_manifest_again(tmp_path: Path, job: Job, step: int) -> None:
    """It was tried for as long as a job may be suspended, which no stop waits for."""
    one = publishing(tmp_path, job)
    away(one)
    assert "once it can be" in one.commit(step).reason
    one.publisher.hurry()
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointFailed)
    one.publisher.close()


def test_the_core_waits_for_what_the_publisher_has_to_say_last(tmp_path: Path) -> None:
    """It had given up by then: why was not said, and what was yet published came too late."""
    elastic = JOB.elastic.model_copy(update={"suspend_timeout_s": 0.5})
    job = JOB.model_copy(update={"elastic": elastic})
    one, began_s = publishing(tmp_path, job), time.monotonic()
    away(one)
    assert "once it can be" in one.commit(job.steps).reason
    failed = one.posted.get(timeout=DEADLINE_S)
    assert isinstance(failed, ev.CheckpointFailed) and "503 Slow Down" in failed.reason
    assert time.monotonic() - began_s < policy_of(job).publish_timeout_s
    one.publisher.close()


def test_no_job_is_complete_with_a_checkpoint_that_is_damaged(tmp_path: Path) -> None:
    """It was published, the job was complete, and its keepers had let go, as that was found."""
    one = publishing(tmp_path)
    assert isinstance(one.commit(1), ev.CheckpointCommitted)
    one.settle()
    failed = one.commit(JOB.steps, lambda: one.damage(JOB.steps))
    assert isinstance(failed, ev.CheckpointFailed), failed
    assert "digest" in failed.reason
    one.publisher.close()
    assert one.steps() == [1], "nobody is to take it for a checkpoint"
    assert one.posted.empty()


def test_the_last_is_read_once(tmp_path: Path) -> None:
    one = publishing(tmp_path)
    asked: list[str] = []
    reading: Any = one.publisher._reading
    read = reading.read
    reading.read = lambda key, *span: (asked.append(key), read(key, *span))[1]
    assert isinstance(one.commit(JOB.steps), ev.CheckpointCommitted)
    one.publisher.close()
    assert len(asked) == 1


def test_the_last_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers wait for it."""
    monkeypatch.setattr(publisher, "CLOSE_S", -1.0)
    one = publishing(tmp_path)
    warned = one.commit(JOB.steps)
    assert "step 100 is published before it was read back" in warned.reason
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    one.publisher.close()


def test_what_is_written_for_a_stop_is_read_back(tmp_path: Path) -> None:
    one = publishing(tmp_path)
    one.commit(1)
    one.settle()
    one.publisher.hurry()
    assert isinstance(one.commit(2), ev.CheckpointCommitted)
    one.publisher.close()
    assert one.steps() == [2] and one.posted.empty()


def test_who_ends_at_once_publishes_the_last_unread(tmp_path: Path) -> None:
    one, unread = publishing(tmp_path), Unread()
    calls: Any = one.publisher._reading
    calls._calls._backend = unread

    def end() -> None:
        assert unread.asked.wait(DEADLINE_S)
        one.publisher.close(at_once=True)

    ends = threading.Thread(target=end)
    ends.start()
    assert "is published before it was read back" in one.commit(JOB.steps).reason
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    unread.let_go.set()
    ends.join(DEADLINE_S)
    assert not ends.is_alive()


def test_who_is_asked_to_stop_publishes_what_can_not_be_read_now(tmp_path: Path) -> None:
    """One error of a read left a whole checkpoint without its manifest."""
    one = publishing(tmp_path)

    def refused(*_: Any) -> None:
        raise StoreFailed("503 Slow Down")

    reading: Any = one.publisher._reading
    reading.read = refused
    one.publisher.hurry()
    assert "is published before it was read back: 503" in one.commit(JOB.steps).reason
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    one.publisher.close()
