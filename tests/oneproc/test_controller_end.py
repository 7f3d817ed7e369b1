"""A controller that ends by an exception: its journal has the reason, wherever it lies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.controller import publisher, takeover
from elastic_ft.controller.controller import Controller
from elastic_ft.controller.hearing import Failed, Said
from elastic_ft.controller.watchdog import Watchdog
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER, Member, NodeId
from elastic_ft.errors import ConfigError, JobFailed, StoreFailed, UsageError
from elastic_ft.groups import store_links
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import replay
from elastic_ft.observe.lines import parse_lines
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import read_lines
from elastic_ft.storage import owners
from elastic_ft.storage.kinds import Backend
from elastic_ft.storage.store import open_store
from elastic_ft.transport.control import NodeHealth, Note
from elastic_ft.transport.reception import listen
from elastic_ft.transport.tls import JobKey
from tests.oneproc.test_publisher import DEADLINE_S, JOB, Hanging


class Unstartable(LocalHost):
    served = ("", 0)

    def start(self, post: Any, controller: tuple[str, int], key: JobKey) -> None:
        self.served = controller
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


def test_what_was_opened_is_closed_where_the_start_fails(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    folder, host = RunFolder(f"{tmp_path}/run"), Unstartable({"n0": 1})
    controller = Controller(JOB, host, folder, f"{tmp_path}/checkpoints")
    with pytest.raises(ZeroDivisionError):
        controller.run()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host.served, DEADLINE_S)
    assert controller._connections._store is None
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread


def two_free_ports() -> tuple[int, int]:
    """Neighbours."""
    while True:
        with listen("127.0.0.1") as first:
            port = first.getsockname()[1]
            with contextlib.suppress(ConfigError), listen("127.0.0.1", range(port + 1, port + 2)):
                return port, port + 1


def test_ports_too_few_for_the_store_are_found_before_workers_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others that listen came first, as torch was imported for the store meanwhile."""
    serve = store_links.serve_store

    def slow(*args: Any) -> Any:
        threading.Event().wait(1.0)
        return serve(*args)

    monkeypatch.setattr(store_links, "serve_store", slow)
    first, last = two_free_ports()
    network = JOB.network.model_copy(update={"ports": f"{first}-{last}"})
    job, host = JOB.model_copy(update={"network": network}), Unstartable({"n0": 1})
    controller = Controller(job, host, RunFolder(f"{tmp_path}/run"), f"{tmp_path}/checkpoints")
    with pytest.raises(ConfigError, match=r"network\.ports: none of"):
        controller.run()
    assert host.served == ("", 0)


def has(node: NodeId, kept: int) -> Said:
    """What its keeper says of itself."""
    return Said(Member(f"{KEEPER}{node}", node, "host", 1), NodeHealth(node, kept, 1, 1))


class Noted(LocalHost):
    """Says something when it starts, and notes how long keepers have at the end."""

    def __init__(self, *told: Any) -> None:
        super().__init__({})
        self._told = told
        self.given_s: list[float] = []

    def start(self, post: Any, controller: tuple[str, int], key: JobKey) -> None:
        for message in self._told:
            post(message)
        super().start(post, controller, key)

    def close(self, keepers_s: float = 0.0) -> None:
        self.given_s.append(keepers_s)
        super().close()


MUCH = 8 << 30
GONE = ev.KeeperLost(0.0, "n0")


@pytest.mark.parametrize(
    ("told", "least_s"),
    [
        ([has("n0", 0)], 60.0),
        ([has("n0", MUCH)], 850.0),
        ([has("n0", MUCH), has("n1", 1)], 850.0),
        ([has("n0", MUCH), has("n0", 0)], 60.0),
        ([has("n0", MUCH), GONE], 60.0),
    ],
    ids=["nothing", "much", "one of two has much", "no longer", "it is gone"],
)
def test_keepers_that_have_much_are_given_time_to_save_it(
    tmp_path: Path, told: list[Any], least_s: float
) -> None:
    """What they have by then counts: it was the most that any had ever had."""
    host = Noted(*told, Failed(ZeroDivisionError("no way to go on")))
    controller = Controller(JOB, host, RunFolder(f"{tmp_path}/run"), f"{tmp_path}/checkpoints")
    with pytest.raises(ZeroDivisionError):
        controller.run()
    (given_s,) = host.given_s
    assert least_s <= given_s <= least_s + 100


def test_who_asks_to_stop_does_not_wait_for_all_that_keepers_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour, where the store is away."""
    host = Noted(has("n0", MUCH), ev.StopRequested(0.0, "enough"))
    controller = Controller(JOB, host, RunFolder(f"{tmp_path}/run"), f"{tmp_path}/checkpoints")
    monkeypatch.setattr(controller, "_left_unsaved", lambda: True)
    assert controller.run()["status"] == "stopped"
    assert host.given_s == [60.0]


def test_two_jobs_with_one_checkpoint_url_are_refused(tmp_path: Path) -> None:
    url = f"{tmp_path}/checkpoints"
    first = Controller(JOB, Unstartable({"n0": 1}), RunFolder(f"{tmp_path}/one"), url)
    with pytest.raises(ZeroDivisionError):
        first.run()
    other = JOB.model_copy(update={"name": "other"})
    second = Controller(other, Unstartable({"n0": 1}), RunFolder(f"{tmp_path}/two"), url)
    with pytest.raises(UsageError, match=r"checkpoints is of job 'job' .*, not of 'other'"):
        second.run()
    first._publisher.claim.check()


def test_who_is_killed_while_it_ends_leaves_no_one_to_wait_for(tmp_path: Path) -> None:
    """Of the two marks the checkpoints' comes first: without it the next start would wait for
    keepers that were released."""
    marked: list[bool] = []

    class Closing(RunFolder):
        def close(self) -> None:
            marked.append(owners.is_rescued(open_store(url), controller.run_id))
            super().close()

    url = f"{tmp_path}/checkpoints"
    controller = Controller(JOB, LocalHost({}), Closing(f"{tmp_path}/run"), url)
    controller.stop("enough")
    assert controller.run()["status"] == "stopped"
    assert marked == [True]


def test_a_job_that_ends_without_a_step_tells_how_far_it_came_before_its_last_line(
    tmp_path: Path,
) -> None:
    folder = RunFolder(f"{tmp_path}/run")
    controller = Controller(JOB, LocalHost({}), folder, f"{tmp_path}/checkpoints")
    controller.post(ev.WorkerReady(time.time(), Member("w0", "n0", "host", 1)))
    controller.post(ev.WorkerLost(time.time(), "w0", "killed"))
    controller.stop("enough")
    startup = controller.run()["startup"]
    lines = read_lines(folder.path / "events.jsonl")
    (told,) = [line for line in lines if line["event"] == "startup"]
    assert lines[-1]["event"] == "finished"
    assert startup.items() <= told.items()
    assert startup["worker"] == "w0" and "first_step_s" not in startup
    assert replay.check_replay(folder.path).difference == ""


class HangingEnd(Hanging):
    """A mount that hangs as the end of a run is noted there."""

    def put(self, key: str, parts: Any, timeout_s: float) -> None:
        if key.endswith(".ended"):
            self.asked.set()
            assert self.let_go.wait(DEADLINE_S)
        self._backend.put(key, parts, timeout_s)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        self.put(key, [data], timeout_s)
        return True


def test_a_checkpoint_store_that_hangs_at_the_end_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A controller stood there for ever, its job without a result."""
    monkeypatch.setattr(publisher, "CLOSE_S", 0.5)
    folder = RunFolder(f"{tmp_path}/run")
    controller = Controller(JOB, LocalHost({}), folder, f"{tmp_path}/checkpoints")
    hanging: Any = HangingEnd(controller._publisher._store)
    controller._publisher._store.backend = hanging
    controller.stop("enough")
    began, results = time.monotonic(), list[Any]()
    running = threading.Thread(target=lambda: results.append(controller.run()), daemon=True)
    running.start()
    running.join(DEADLINE_S / 2)
    assert not running.is_alive(), "it waits for the store"
    assert hanging.asked.is_set() and time.monotonic() - began < DEADLINE_S / 2
    assert results[0]["status"] == "stopped"
    assert (folder.path / "result.json").exists()
    assert "the end of this run is not recorded" in caplog.text
    hanging.let_go.set()


class Ending:
    """In the place of a publisher's ``close``: what is found out while the job ends."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._close = controller, controller._publisher.close
        self.at_once: list[bool] = []

    def __call__(self, at_once: bool = False) -> None:
        if not self.at_once:
            url = "checkpoints/step-3"
            self._controller.post(ev.CheckpointDamaged(time.time(), 3, url, "a digest differs"))
            self._controller.post(Note("controller", 1, "checkpoint_warning", "not pruned"))
        self.at_once.append(at_once)
        self._close(at_once)


def test_what_is_found_out_of_checkpoints_while_a_job_ends_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped: the last checkpoint's damage was known, and nobody told. Asked to stop,
    the job waits for no reading."""
    folder = RunFolder(f"{tmp_path}/run")
    controller = Controller(JOB, LocalHost({}), folder, f"{tmp_path}/checkpoints")
    ending = Ending(controller)
    monkeypatch.setattr(controller._publisher, "close", ending)
    controller.stop("enough")
    result = controller.run()
    assert result["status"] == "stopped"
    lines = read_lines(folder.path / "events.jsonl")
    events = [line["event"] for line in lines]
    assert {"checkpoint_refused", "checkpoint_warning"} < set(events)
    assert ending.at_once[0]
    assert events[-1] == "finished" and events.count("finished") == 1
    assert (lines[-1]["status"], lines[-1]["reason"]) == (result["status"], result["reason"])


def test_who_answered_while_others_were_heard_was_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline passes while a batch is worked on, and the answers lie in the inbox by then."""
    folder = RunFolder(f"{tmp_path}/run")
    controller = Controller(JOB, LocalHost({}), folder, f"{tmp_path}/checkpoints")
    told: list[Any] = []

    def handle(message: Any) -> None:
        told.append(message)
        if message == "slow":
            controller._timers.start(cmd.StartTimer("pause", 1, 0.0))
            controller.post("an answer")

    monkeypatch.setattr(controller, "_handle", handle)
    monkeypatch.setattr(Watchdog, "look", lambda watchdog: iter(()))
    controller.post("slow")
    controller._turn()
    assert told[:2] == ["slow", "an answer"]
    assert isinstance(told[2], ev.TimerFired)
    controller._publisher.close()
    folder.close()


def test_a_renamed_job_goes_on_where_changes_are_accepted(tmp_path: Path) -> None:
    url, host = f"{tmp_path}/checkpoints", Unstartable({"n0": 1})
    renamed = JOB.model_copy(update={"name": "renamed"})
    for job, accept in ((JOB, False), (renamed, True)):
        folder = RunFolder(f"{tmp_path}/run")
        with pytest.raises(ZeroDivisionError):  # it comes as far as that
            Controller(job, host, folder, url, accept_changes=accept).run()
    (line,) = [line for line in read_lines(folder.path / "events.jsonl") if "changes" in line]
    assert (line["event"], line["changes"]) == ("job_changed", {"name": ["job", "renamed"]})


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
    with pytest.raises(UsageError, match="is of job 'other'"):
        refused.run()
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    folder.close()


class Returning:
    """A backend that no operation reaches the first few times."""

    def __init__(self, backend: Backend, refusals: int) -> None:
        self._backend, self.refusals = backend, refusals

    def __getattr__(self, name: str) -> Any:
        if self.refusals:
            self.refusals -= 1
            return getattr(Away(), name)
        return getattr(self._backend, name)


def with_a_remote_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, timeout_s: float
) -> Controller:
    """Whose store can't be reached at first."""
    monkeypatch.setattr(takeover, "REREAD_MIN_S", 0.01)
    elastic = JOB.elastic.model_copy(update={"suspend_timeout_s": timeout_s})
    job = JOB.model_copy(update={"elastic": elastic})
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    backend: Any = Returning(folder._store.backend, refusals)
    folder._store.backend, folder._store.attempts = backend, 1
    return Controller(job, Unstartable({"n0": 1}), folder, f"{tmp_path}/checkpoints")


def test_a_run_folder_that_is_away_at_the_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = with_a_remote_folder(tmp_path, monkeypatch, refusals=3, timeout_s=60)
    with pytest.raises(ZeroDivisionError):  # it comes as far as that
        controller.run()
    events = parse_lines(open_store(controller.run_folder.url).get("events.jsonl"), "events.jsonl")
    assert events[-1]["event"] == "controller_failed"


def test_a_run_folder_that_stays_away_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = with_a_remote_folder(tmp_path, monkeypatch, refusals=10**6, timeout_s=0.1)
    with pytest.raises(StoreFailed, match="ConnectionError: refused"):
        controller.run()


def test_who_asks_to_stop_is_not_kept_waiting_by_a_run_folder_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = with_a_remote_folder(tmp_path, monkeypatch, refusals=10**6, timeout_s=3600)
    controller.stop("enough")
    with pytest.raises(JobFailed, match=r"enough.*ConnectionError: refused"):
        controller.run()
