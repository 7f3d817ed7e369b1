"""A job whose run folder is in S3 is watched from outside while that store is away for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from chaos.object_store_proxy import FaultKind, ObjectStoreProxy, StoreFault
from chaos.s3_server import S3Server
from elastic_ft.cli.app import COMPLETED, INTERRUPTED, run_command
from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.errors import JobFailed
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import alive, handover, run_folder, run_reader, stop_request
from elastic_ft.observe.run_folder import RunFolder
from tests.waiting import until

REQUESTS_BEFORE = 3  # of a controller, before its own of the run folder
AT_ONCE_S = 30.0  # less than a store has to answer
MINUTE_S = 60.0
REQUESTS_LOST = 40  # of an outage that is longer than a sign of life may be late
JOB = {
    "name": "watched",
    "steps": 1,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:", "sequence_length": 16},
    "batch": {"global_batch_size": 4, "micro_batch_size": 1},
}
RESULT = {"status": "completed", "reason": "", "steps": 1, "final_loss": 1.0, "goodput": 1.0}


@pytest.fixture
def as_it_is(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreProxy]:
    """With all of its waits as long as they are."""
    with ObjectStoreProxy(s3.endpoint) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def proxy(as_it_is: ObjectStoreProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreProxy:
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 0.1)
    monkeypatch.setattr(alive, "STILL_REMOTE_S", 3.0)
    return as_it_is


@pytest.fixture
def running(s3: S3Server, as_it_is: ObjectStoreProxy) -> Iterator[RunFolder]:
    """The folder of a job that is under way, with its controller's signs of life."""
    folder = RunFolder(s3.url(uuid4().hex))
    folder.take_over("run1", "watched")
    folder.write_job(Job.model_validate(JOB).model_dump(mode="json"))
    signs = alive.Alive(folder.path)
    signs.start()
    until(lambda: alive.last_sign(folder.url) is not None)
    yield folder
    signs.stop()
    folder.close()


def outage(proxy: ObjectStoreProxy) -> None:
    proxy.set(StoreFault("busy"))
    until(lambda: proxy.fired["busy"] >= REQUESTS_LOST)
    proxy.set()


def test_who_is_attached_outlasts_an_outage(
    proxy: ObjectStoreProxy, running: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ended with the first request that failed, as if the job had; and of a store that was back
    it took the sign of before for one that is not renewed."""

    def go_on() -> None:
        until(lambda: any(thread.name == "followed" for thread in threading.enumerate()))
        outage(proxy)
        before = alive.last_sign(running.url)
        until(lambda: alive.last_sign(running.url) not in (None, before))
        running.write_result(RESULT)
        running.close()

    others = threading.Thread(target=go_on)
    others.start()
    code = run_command(["attach", running.url])
    others.join()
    said = capfd.readouterr()
    assert (code, said.err) == (COMPLETED, "")
    assert "can't be read" in said.out and "can be read again" in said.out
    assert said.out.splitlines()[-1].startswith("completed: 1 steps")


def test_who_has_asked_to_stop_outlasts_an_outage(
    proxy: ObjectStoreProxy, running: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    def go_on() -> None:
        until(lambda: running.asked(stop_request.NAME) is not None)
        outage(proxy)
        running.write_result(RESULT | {"status": "stopped", "reason": "asked"})
        running.close()

    others = threading.Thread(target=go_on)
    others.start()
    code = run_command(["stop", running.url])
    others.join()
    said = capfd.readouterr()
    assert (code, said.err) == (COMPLETED, "")
    assert said.out.splitlines()[-1] == "stopped: asked"


@pytest.mark.soak
@pytest.mark.parametrize("command", ["attach", "stop"])
@pytest.mark.parametrize("fault", ["busy", "stall"])
def test_a_minute_without_the_store_is_outlasted(
    running: RunFolder,
    as_it_is: ObjectStoreProxy,
    command: str,
    fault: FaultKind,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the clock, in real time: "stall" takes each request and answers none."""
    began = threading.Event()

    def go_on() -> None:
        if command == "stop":
            until(lambda: running.asked(stop_request.NAME) is not None)
        else:
            until(lambda: any(thread.name == "followed" for thread in threading.enumerate()))
        as_it_is.set(StoreFault(fault))
        began.set()
        threading.Event().wait(MINUTE_S)
        as_it_is.set()
        before = alive.last_sign(running.url)
        until(lambda: alive.last_sign(running.url) not in (None, before))
        running.write_result(RESULT | {"status": "stopped", "reason": "asked"})
        running.close()

    others = threading.Thread(target=go_on)
    others.start()
    code = run_command([command, running.url])
    others.join()
    said = capfd.readouterr()
    assert began.is_set() and as_it_is.fired[fault]
    assert (code, said.err) == (INTERRUPTED if command == "attach" else COMPLETED, ""), said
    assert "stopped: " in said.out.splitlines()[-1]


def test_how_a_stopped_job_has_ended_is_read_once_it_can_be(
    proxy: ObjectStoreProxy,
    running: RunFolder,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was "without a result" where the store was away just then."""
    monkeypatch.setattr(run_reader, "READ_DEADLINE_S", 0.5)

    def go_on() -> None:
        until(lambda: running.asked(stop_request.NAME) is not None)
        proxy.set(StoreFault("busy", methods=("GET",), path=r"result\.json"))
        running.write_result(RESULT | {"status": "stopped", "reason": "asked"})
        running.close()
        until(lambda: proxy.fired["busy"] >= REQUESTS_LOST / 4 or has_ended.is_set())
        proxy.set()

    others, has_ended = threading.Thread(target=go_on), threading.Event()
    others.start()
    code = run_command(["stop", running.url])
    has_ended.set()
    others.join()
    said = capfd.readouterr()
    assert (code, said.err) == (COMPLETED, "")
    assert said.out.splitlines()[-1] == "stopped: asked"


@pytest.mark.parametrize(("path", "requests"), [("", REQUESTS_BEFORE), (r"ledger\.jsonl", 1)])
def test_a_local_interrupt_waits_for_no_store_before_the_job_has_begun(
    s3: S3Server,
    proxy: ObjectStoreProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    requests: int,
) -> None:
    """A store that takes a request and answers nothing kept it waiting for a minute and more; also
    while what the folder has is fetched."""
    for module in (run_reader, handover, alive):
        monkeypatch.setattr(module, "READ_DEADLINE_S", 0.5)
    folder = RunFolder(s3.url(uuid4().hex))
    controller = Controller(
        Job.model_validate(JOB), LocalHost({"n0": 1}), folder, f"{tmp_path}/checkpoints"
    )
    proxy.set(StoreFault("stall", path=path))
    raised = list[BaseException]()

    def run() -> None:
        try:
            controller.run()
        except BaseException as error:
            raised.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    until(lambda: proxy.fired["stall"] >= requests)
    controller.stop("interrupted")
    running.join(AT_ONCE_S)
    assert not running.is_alive(), "it waits for the store"
    assert isinstance(raised[0], JobFailed) and "interrupted" in str(raised[0])
