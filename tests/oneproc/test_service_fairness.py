"""One who asks for much keeps nobody else waiting, and what was done is not said to be refused."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.service import api, crews
from elastic_ft.service.access import Rights, new_token, read_token
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service import Service
from elastic_ft.service.service_client import ServiceAway
from tests.oneproc.served import JOB, WAIT_S, Served, no_cluster
from tests.oneproc.test_service_crowds import until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    everything = {name: Rights(new_token(tmp_path / name), write=("*",)) for name in ("ann", "bob")}
    served = Served(tmp_path / "F", everything)
    yield served
    served.close()


def test_slow_questions_of_one_keep_nobody_else_waiting(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of one reader's, while the store was away: everybody else's new stream was a 503."""
    monkeypatch.setattr(crews.LOOKS, "asked_max", 12)
    monkeypatch.setattr(crews.LOOKS, "of_one_max", 6)
    monkeypatch.setattr(api, "PING_EVERY_S", 0.01)
    ann, bob = served.client(tmp_path / "ann"), served.client(tmp_path / "bob")
    slow, other, live = (ann.submit(JOB)["id"] for _ in range(3))
    for job in (slow, other):
        ann.stop(job)
    until(lambda: not {slow, other} & served.service._hands.keys(), "they are done with")
    served.service._ended.clear()
    asked, back, read = threading.Semaphore(0), threading.Event(), served.service.story

    def away(job: str) -> Any:
        if job == slow:
            asked.release()
            assert back.wait(WAIT_S)
        return read(job)

    monkeypatch.setattr(served.service, "story", away)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ann.status, slow) for _ in range(6)]
        try:
            for _ in range(3):  # all threads but one
                assert asked.acquire(timeout=WAIT_S)
            until(lambda: crews.LOOKS._asked["ann"] == 6, "the others wait")
            with pytest.raises(ServiceAway, match=r"^6 of ann's are waiting .*: ask again later"):
                ann.status(slow)
            assert bob.status(other)["state"] == "stopped"  # what lies in a store, too
            monkeypatch.setattr(served.service, "_round", int)  # nobody has looked at the next one
            new = bob.submit(JOB)["id"]
            monkeypatch.setattr(crews.LOOKS, "asked_max", 0)
            bearer = {"Authorization": f"Bearer {read_token(tmp_path / 'bob')}"}
            for job in (live, new):
                url = f"{served.url}/api/v1/jobs/{job}"
                for what in ("events", "steps"):
                    stream = urllib.request.Request(f"{url}/{what}", headers=bearer)
                    with urllib.request.urlopen(stream, timeout=WAIT_S) as lines:
                        assert lines.readline().startswith(b": still")
                picture = urllib.request.Request(f"{url}/view", headers=bearer)
                with urllib.request.urlopen(picture, timeout=WAIT_S) as answer:
                    assert answer.status == 200
        finally:
            back.set()
        assert {answer.result(WAIT_S)["state"] for answer in waiting} == {"stopped"}


def test_a_change_that_was_made_is_not_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too many waited for words it was answered with a 503; who asked again, as one does, was
    told that there was nothing to stop."""
    ann = served.client(tmp_path / "ann")
    job = ann.submit(JOB)["id"]
    for crew in (crews.LOOKS, crews.RUNS, crews.WORDS):
        monkeypatch.setattr(crew, "asked_max", 0)
    assert ann.set_priority(job, 7)["priority"] == 7
    assert ann.resize(job, 1)["workers"]["max"] == 1
    for _ in range(2):
        stopped = ann.stop(job)
        assert (stopped["state"], stopped["step"], stopped["world"]) == ("stopped", 0, [])
    assert sum("StopAsked" in path.read_text() for path in (tmp_path / "F/journal").iterdir()) == 1


def test_the_story_of_a_job_that_nobody_has_looked_at_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who followed it in the moment after its submission was told nothing until it ended."""
    made = Service(str(tmp_path), SharingTerms(), no_cluster, print, Sight)
    made.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(made, "_round", int)
            job = made.submit({"job": JOB}, "").result(WAIT_S)
            with ThreadPoolExecutor(4) as pool:
                stories = list(pool.map(made.story, [job] * 8))
        assert {id(story) for story in stories} == {id(made.hand(job).story)}
        made.stop(job, False, "").result(WAIT_S)
        until(lambda: job not in made._hands, "it is done with")
    finally:
        made.close()
