"""The start of a controller where workers of another one live, as far as it can be seen alone."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.config import Job
from elastic_ft.controller import takeover
from elastic_ft.controller.controller import Controller
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER, WorkerId
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import alive
from elastic_ft.observe.replay import check_replay
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import read_lines
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store
from elastic_ft.transport.tls import new_key
from tests.oneproc.test_controller_end import Away, Returning
from tests.oneproc.test_publisher import JOB


class Killed(BaseException):
    """In place of SIGKILL: nothing of ours catches it."""


class Outlived(LocalHost):
    """Somebody of an earlier controller lives, and will never call."""

    def __init__(self, *lives: WorkerId) -> None:
        super().__init__({})
        self.lives = frozenset(lives)
        self.given_s: list[float] = []
        self.left = 0

    def survivors(self) -> frozenset[WorkerId]:
        return self.lives

    def close(self, keepers_s: float = 0.0) -> None:
        self.given_s.append(keepers_s)
        super().close()

    def leave(self) -> None:
        self.left += 1
        super().leave()


@dataclass
class Line:
    """Of controllers, of one job, one after the other."""

    folder: Path
    job: Job = JOB
    host: Outlived = field(default_factory=Outlived)

    def __post_init__(self) -> None:
        self.key, self.url = new_key(tls=False), f"{self.folder}/checkpoints"

    def controller(self) -> Controller:
        self.host = Outlived(*[f"{KEEPER}n0"] if (self.folder / "run").exists() else ())
        return Controller(
            self.job, self.host, RunFolder(f"{self.folder}/run"), self.url, key=self.key
        )

    def reign(self, controller: Controller | None = None, *told: Any) -> Controller:
        """One that is killed as soon as it has begun, and was ``told``."""
        one = controller or self.controller()
        turn = one._turn

        def die() -> None:
            for message in told:
                one._handle(message)
            one.run_folder.flush()
            one._close = lambda: None  # type: ignore[method-assign]
            raise Killed

        one._turn = die  # type: ignore[method-assign]
        try:
            with pytest.raises(Killed):
                one.run()
        finally:
            one._turn = turn  # type: ignore[method-assign]
            one._durability.close()
            one._connections.close()
            one.metrics.close()
        return one

    def age(self, by_s: float) -> None:
        """As if all of it had happened so much earlier."""

        def earlier(found: re.Match[str]) -> str:
            return f"{found[1]}{float(found[2]) - by_s:f}"

        for name in ("inbox.jsonl", alive.NAME):
            path = self.folder / "run" / name
            path.write_text(re.sub(r'("(?:told_)?at_s": )([\d.]+)', earlier, path.read_text()))

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = read_lines(self.folder / "run" / "events.jsonl")
        return [line for line in lines if line["event"] == name]

    def owner(self) -> owners.Owner:
        found, _ = owners.newest(open_store(self.url))
        assert found is not None
        return found


def job_with(**elastic: Any) -> Job:
    return JOB.model_copy(update={"elastic": JOB.elastic.model_copy(update=elastic)})


def test_who_lives_is_adopted_soon_after(tmp_path: Path) -> None:
    line = Line(tmp_path)
    first = line.reign()
    second = line.reign()
    assert line.owner().address and line.owner().adopts == first.run_id == second.run_id
    assert line.events("in_charge") and not line.events("not_adopted")
    (began,), (follows,) = line.events("controller_started"), line.events("in_charge")
    assert (began["controller"], follows["controller"]) == (1, 2)
    spent_s = follows["at_s"] - began["at_s"]
    assert 0 <= follows["away_s"] <= spent_s + 0.001, "told in whole milliseconds"
    assert began["pid"] == follows["pid"] == os.getpid(), "who was in charge, from the beginning"


def test_who_saves_and_leaves_by_now_is_not_adopted(tmp_path: Path) -> None:
    """Nobody was in charge for longer than survivors look for a controller."""
    line = Line(tmp_path)
    line.reign()
    line.age(JOB.elastic.controller_timeout_s)
    line.reign()
    (told,) = line.events("not_adopted")
    assert "nobody was in charge for too long" in told["reason"]
    assert line.owner().address == "" and not line.events("in_charge")


def test_a_controller_that_lived_and_was_told_nothing_was_in_charge(tmp_path: Path) -> None:
    """A step may take longer than survivors look for a controller."""
    line = Line(tmp_path)
    line.reign()
    line.age(JOB.elastic.controller_timeout_s)
    alive.leave_sign(tmp_path / "run", in_charge=True)
    line.reign()
    assert line.events("in_charge")


def test_who_made_a_snapshot_and_was_told_nothing_since_is_followed(tmp_path: Path) -> None:
    """It was said that its journal has no beginning."""
    line = Line(tmp_path)
    first = line.controller()

    def begin_anew(_: Any) -> None:
        first.run_folder._inbox_bytes = 1 << 30
        first._observer.snapshot(time.time(), first.state, first.policy, first._standing)

    turn = first._handle
    first._handle = lambda told: begin_anew(told) if told is None else turn(told)  # type: ignore[method-assign]
    line.reign(first, None)
    line.reign()
    assert line.events("in_charge") and not line.events("not_adopted")


def test_one_that_waited_for_the_store_was_not_in_charge(tmp_path: Path) -> None:
    """Its sign of life is new, and nobody could have called it."""
    line = Line(tmp_path)
    line.reign()
    line.age(JOB.elastic.controller_timeout_s)
    alive.leave_sign(tmp_path / "run")
    line.reign()
    assert line.events("not_adopted") and line.owner().address == ""


def test_a_claim_that_waits_for_the_store_for_too_long_adopts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "REREAD_MIN_S", 0.1)
    monkeypatch.setattr(takeover, "REREAD_MAX_S", 0.1)
    line = Line(tmp_path, job_with(controller_timeout_s=2.0))
    line.reign()
    second = line.controller()
    store = second._publisher._store
    assert "://" not in store.url
    backend: Any = Returning(store.backend, 10**6)
    store.backend, store.attempts = backend, 1

    def come_back() -> None:
        """2.5 s after it was first asked, however late that is."""
        pause, deadline_s = threading.Event(), time.monotonic() + 60.0
        while backend.refusals == 10**6 and time.monotonic() < deadline_s:
            pause.wait(0.01)
        pause.wait(2.5)
        backend.refusals = 0

    threading.Thread(target=come_back, daemon=True).start()
    line.reign(second)
    assert line.events("suspended") and line.events("not_adopted")
    assert line.owner().address == "" and not line.events("in_charge")


class NothingEnds(Returning):
    """A backend that is away whenever the end of a run is to be noted."""

    def put(self, key: str, *args: Any) -> Any:
        return (Away() if key.endswith(".ended") else self._backend).put(key, *args)


def test_a_store_that_goes_away_as_the_job_is_taken_over_ends_no_job(tmp_path: Path) -> None:
    """It did: what could be noted the next time was taken for the job's failure."""
    line = Line(tmp_path)
    line.reign()
    second = line.controller()
    store = second.run_folder._store
    store.backend, store.attempts = NothingEnds(store.backend, 0), 1
    line.reign(second)
    (told,) = line.events("in_charge")
    assert (warned := line.events("checkpoint_warning")) and warned[-1]["seq"] < told["seq"]
    assert "the end of an earlier run is not noted" in warned[-1]["reason"]
    line.reign()
    assert len(line.events("in_charge")) == 2 and not line.events("not_adopted")


STOP = ev.StopRequested(0.0, "enough")
OVERDUE = ev.TimerFired(0.0, "start", 0)  # no worker ever came


@pytest.mark.parametrize(
    ("told", "status", "least_s"),
    [(STOP, "stopped", 60.0), (OVERDUE, "failed", JOB.elastic.suspend_timeout_s)],
    ids=["stopped", "failed"],
)
def test_keepers_of_a_job_that_has_ended_unsaved_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, status: str, least_s: float
) -> None:
    """Who is told that it can call does, and nothing is left of it when the job's end comes."""
    line = Line(tmp_path)
    line.reign(None, told)
    second = line.controller()
    monkeypatch.setattr(second, "_left_unsaved", lambda: True)
    result = second.run()
    assert result["status"] == status, result
    assert line.owner().address == "" and line.owner().adopts == second.run_id
    assert line.host.given_s == [least_s]
    (told,) = line.events("finished")
    assert line.events("in_charge") and (told["status"], told["reason"]) == (
        result["status"],
        result["reason"],
    )
    assert check_replay(tmp_path / "run").difference == ""


def test_a_controller_killed_as_it_ended_leaves_its_last_line_to_the_next(tmp_path: Path) -> None:
    """With the line, and before the result."""
    line = Line(tmp_path)
    first = line.controller()
    tell = first._tell_end

    def die(*finish: Any) -> None:
        tell(*finish)
        first.run_folder.flush()
        raise Killed

    first._tell_end = die  # type: ignore[method-assign]
    first.stop("enough")
    with pytest.raises(Killed):
        first.run()
    assert len(line.events("finished")) == 1 and not (tmp_path / "run/result.json").exists()
    result = line.controller().run()
    (told,) = line.events("finished")
    assert (told["status"], told["reason"]) == (result["status"], result["reason"])
    assert told["seq"] > line.events("in_charge")[-1]["seq"]
    assert check_replay(tmp_path / "run").difference == ""


def test_a_claim_that_comes_to_nothing_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away for too long: whoever lives is nobody's yet, and the steps count."""
    line = Line(tmp_path, job_with(suspend_timeout_s=0.1))
    line.reign()
    second = line.controller()
    monkeypatch.setattr(second.run_folder, "last_step", lambda: 3)
    store = second._publisher._store
    backend: Any = Returning(store.backend, 10**6)
    store.backend, store.attempts = backend, 1
    result = second.run()
    assert (result["status"], result["steps"]) == ("suspended", 3)
    assert (line.host.left, line.host.given_s) == (1, [])
    with pytest.raises(OSError, match="Bad file descriptor"):
        assert second._connections.server.port, "it is closed"
