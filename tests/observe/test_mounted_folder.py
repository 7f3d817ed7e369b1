"""A run folder in a mount that can hang is written as one in an object store is, and read likewise;
what was written there before, and what is read elsewhere as a plain folder, is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.observe import run_folder
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import RunReader, read_lines
from elastic_ft.storage import mounts
from elastic_ft.storage.cancellable import CancellableStore

SEGMENT_BYTES = 512
OVERTAKES_S = 3.0  # what a start takes that nobody holds up


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in RunReader(path).steps()]


def record(folder: RunFolder, steps: range) -> None:
    """As a run that is killed leaves it: without a result."""
    folder.take_over(uuid4().hex, "job")
    folder.repair()
    for step in steps:
        folder.record_step({"step": step, "generation": 1}, [step])
        folder.journal(1.0, "said", 1, str(step), {})
        folder.record_inbox({"type": "Told", "step": step})
    folder.close()


def test_each_goes_on_where_the_other_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own machine has a disk where its clients have a mount."""
    record(RunFolder(str(run)), range(1, 11))
    assert not (run / "segments").exists()
    tail = RunReader(run).tail("steps.jsonl")
    assert [line["step"] for line in tail.read()] == [*range(1, 11)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(mounts.NAMED, str(run.parent))
        assert steps_of(run) == [*range(1, 11)]
        folder = RunFolder(str(run), SEGMENT_BYTES)
        assert folder.is_remote and folder.path != run
        record(folder, range(11, 41))
        assert not folder.path.exists(), "all is there"
        assert (run / "segments" / "steps.jsonl").is_dir()
        assert steps_of(run) == [*range(1, 41)]
    assert steps_of(run) == [*range(1, 41)]
    assert [line["step"] for line in tail.read()] == [*range(11, 41)], "who looks on misses none"
    record(RunFolder(str(run)), range(41, 51))
    assert [line["step"] for line in read_lines(run / "steps.jsonl")] == [*range(1, 51)]
    assert [line["seq"] for line in read_lines(run / "events.jsonl")] == [*range(50)]
    assert len(RunReader(run).inbox()) == 50


def test_the_newer_of_two_has_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mounts.NAMED, str(run))
    first, second = RunFolder(f"file://{run}"), RunFolder(str(run))
    first.take_over("run1", "job")
    second.take_over("run2", "job")
    first.journal(1.0, "said", 0, "", {})
    first._mirror()
    with pytest.raises(Superseded, match="by run run2"):
        first.check_owner()
    for folder in (first, second):
        folder.close()


def test_one_of_many_creates_an_owner(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mounts.NAMED, str(run))
    folders = [RunFolder(str(run)) for _ in range(4)]
    threads = [
        threading.Thread(target=folder.take_over, args=[f"run{n}", "job"])
        for n, folder in enumerate(folders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [folder._claim.number for folder in folders if folder._claim is not None]
    assert sorted(numbers) == [1, 2, 3, 4]
    for folder in folders:
        folder.close()


class Waits:
    """A backend whose answers a test lets go."""

    def __init__(self, backend: object) -> None:
        self._backend, self.asked, self.go_on = backend, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        self.asked.set()
        self.go_on.wait(60)
        return getattr(self._backend, name)


class Interrupted(CancellableStore):
    """Whose deadline somebody shortens, and is overtaken by ``others`` if they can."""

    others: Callable[[], object]

    @property
    def deadline_s(self) -> float:
        return self._deadline_s

    @deadline_s.setter
    def deadline_s(self, value: float) -> None:
        if value == run_folder.HEARING_S:
            self.others()
        self._deadline_s = value


def test_who_is_hurried_as_it_begins_keeps_its_deadlines(run: Path) -> None:
    """Had it begun meanwhile, each of its calls had a tenth of its time from then on."""
    folder = RunFolder(str(run))
    folder._store = store = Interrupted(str(run), run_folder.STORE_S)
    taking = threading.Thread(target=folder.take_over, args=["run1", "job"])

    def take() -> None:
        taking.start()
        taking.join(OVERTAKES_S)

    store.others = take
    folder.hurry()
    taking.join(60)
    assert folder._is_begun and store.deadline_s == run_folder.STORE_S
    folder.close()


def test_who_takes_it_over_while_someone_asks_to_stop_waits_no_more(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mounts.NAMED, str(run))
    folder = RunFolder(str(run))
    folder._store.backend._backend = waits = Waits(folder._store.backend._backend)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            folder.take_over("run1", "job")
        except StoreFailed as error:
            raised.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    assert waits.asked.wait(60)
    folder.hurry()
    taking.join(run_folder.HEARING_S + 30)
    assert raised and not taking.is_alive()
    waits.go_on.set()
    folder.close()
