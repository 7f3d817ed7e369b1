"""Nothing that a worker sends ends its controller: it is journalled, and the worker's last word."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.controller.host import Host
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, Member
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.transport.control import FaultFired, Hello, Note, connect
from elastic_ft.transport.wire import Channel
from tests.multiproc.harness import make_job

SOON_S = 60.0
MEMBER = Member("w0", "n0", "host", 1)
OTHER = Member("w9", "n0", "host", 1)


class Nobody(Host):
    """A host that starts no workers."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def start(self, inbox: Any, address: tuple[str, int], key: bytes) -> None:
        self.address, self.key = address, key
        self.started.set()

    def want_workers(self, total: int) -> None: ...

    def kill_worker(self, worker: str) -> None: ...

    def prepare(self, assignment: Assignment) -> dict[str, Any]:
        return {}

    def formed(self, assignment: Assignment) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Unheard:
    """Of a class that the controller does not know."""

    step: int = 1


class Running:
    def __init__(self, folder: Path) -> None:
        self.host = Nobody()
        self.journal = folder / "run" / "events.jsonl"
        host: Any = self.host
        self.controller = Controller(
            make_job(), host, RunFolder(str(folder / "run")), f"{folder}/checkpoints"
        )
        self.failed: list[BaseException] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.host.started.wait(SOON_S)

    def _run(self) -> None:
        try:
            self.controller.run()
        except BaseException as error:
            self.failed.append(error)
        finally:
            self.ended.set()

    def connect(self) -> Channel:
        channel, _ = connect(self.host.address, self.host.key, Hello(MEMBER))
        return channel

    def line(self, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            for line in read_lines(self.journal):
                if line["event"] == event:
                    return line
            assert not self.ended.wait(0.01), self.failed
        raise AssertionError(f"no {event} in the journal")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path)
    yield started
    for _ in range(2):
        started.controller.stop("the test ends")
    started.thread.join(SOON_S)
    assert not started.thread.is_alive()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Unheard(), "'Unheard' is no message for this process"),
        (None, "'NoneType' is no message"),
        (ev.JobStarted(1.0), "'JobStarted' is no message"),
        (FaultFired("w0", 7, 1, 0.0), "FaultFired: IndexError"),
        (Note("w0", 0, "x", "y", {"seq": "oops"}), "a note with the journal's own fields"),
        (Note("w0", 0, "recovered", "y"), "Note: KeyError"),
        (ev.StepApplied(1.0, "w9", 1, 1), "a StepApplied of 'w9', sent by w0"),
        (ev.WorkerReady(1.0, OTHER), "a WorkerReady of 'w9', sent by w0"),
        (ev.StepApplied(1.0, "w0", 1, 1, {"loss": "x"}), "a StepApplied of w0 with loss = 'x'"),
        (ev.StepApplied(1.0, "w0", 1, 1, {"tokens": -1}), "a StepApplied of w0 with tokens = -1"),
        (ev.WorkerReady(1.0, MEMBER, data={"x": 1}), "a WorkerReady of w0 whose data is {'x': 1}"),
        (ev.StepApplied(float("nan"), "w0", 1, 1), "StepApplied.at_s: expected a finite number"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_an_odd_message_is_its_senders_last(running: Running, message: Any, why: str) -> None:
    channel = running.connect()
    channel.send(message)
    with pytest.raises(EOFError):
        while True:  # a pulse may come before the end
            channel.receive(SOON_S)
    refused = running.line("message_refused")
    assert why in refused["reason"] and refused["worker"] == "w0"
    channel.close()
    again = running.connect()
    again.send(Note("w0", 0, "still_here", "the controller is"))
    running.line("still_here")
    again.close()
