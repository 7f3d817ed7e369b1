"""What a run folder keeps of steps that were voided, and what of it its mirror has."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import alive, handover, run_folder, stop_request
from elastic_ft.observe.files import ASIDE_MAX, line_of
from elastic_ft.observe.inbox_file import SNAPSHOT_LINES
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.storage import owners
from elastic_ft.storage.kinds import Backend, Bytes
from elastic_ft.storage.store import open_store
from tests.oneproc.test_controller_end import Returning
from tests.oneproc.test_publisher import DEADLINE_S, JOB
from tests.waiting import until


def test_voided_lines_stay_beside_the_record_and_not_for_ever(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    for step in range(1, 11):
        folder.record_step({"step": step, "generation": 1}, [step])
    folder.truncate(10)
    assert not list(tmp_path.glob("*.[0-9]*.jsonl")), "nothing was voided"
    for step in range(9, 9 - ASIDE_MAX - 2, -1):
        folder.truncate(step)
    left = [line["step"] for line in read_lines(tmp_path / "steps.jsonl")]
    assert left == list(range(1, 9 - ASIDE_MAX))
    assert len(left) == len(read_lines(tmp_path / "ledger.jsonl"))
    numbers = range(3, ASIDE_MAX + 3)
    for name in ("steps", "ledger"):
        beside = sorted(path.name for path in tmp_path.glob(f"{name}.*.jsonl"))
        assert beside == [f"{name}.{number}.jsonl" for number in numbers]
    oldest = [line["step"] for line in read_lines(tmp_path / "steps.3.jsonl")]
    assert oldest == list(range(1, 9))
    folder.close()


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.record_step({"step": 1, "generation": 1, "loss": math.nan, "of": [math.inf, 0.5]}, [1])
    folder.write_result({"final_loss": math.nan})
    folder.close()

    def refuse(found: str) -> None:
        raise AssertionError(f"{found} is not JSON")

    line = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "generation": 1, "loss": None, "of": [None, 0.5]}
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result == {"final_loss": None}


def test_a_successor_that_is_half_written_does_not_end_the_mirror() -> None:
    """Of a store that writes no whole objects: what can't be understood yet is read again."""
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    folder.take_over("run1", "job")
    folder._stop_mirror.set()  # mirrored by hand, below
    store = open_store(folder.url)
    successor = store.get("owners/1").replace(b"run1", b"run2")
    store.put("owners/2", successor[:20])
    folder.journal(1.0, "said", 0, "", {})
    folder._mirror()
    assert "owners/2 is not what a controller writes" in folder.mirror_error
    folder.check_owner()
    store.put("owners/2", successor)
    folder._mirror()
    with pytest.raises(Superseded, match="by run run2"):
        folder.check_owner()
    folder.close()


# ------------------------------------------------------------------------- the mirror


def mirrored_by_hand() -> RunFolder:
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    folder.take_over("run1", "job")
    folder._stop_mirror.set()
    return folder


class Interrupted:
    """A backend before whose puts of ``key`` something happens, once."""

    def __init__(self, backend: Backend, key: str, happens: Callable[[], None]) -> None:
        self._backend, self._key = backend, key
        self._happens: list[Callable[[], None]] = [happens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        if key == self._key and self._happens:
            self._happens.pop()()
        self._backend.put(key, parts, timeout_s)


def test_what_others_wait_for_is_not_held_up_by_what_the_mirror_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sign of life, a request, a successor: seen within one look each, whatever is uploaded."""
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 0.02)
    monkeypatch.setattr(run_folder, "MIRROR_BYTES_PER_S", 1)  # minutes for the first line
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    store = open_store(folder.url)
    folder.take_over("run1", "job")
    folder.journal(1.0, "said", 0, "", {})
    until(lambda: store.exists("events.jsonl"))
    alive.leave_sign(folder.path)
    until(lambda: store.exists(alive.NAME))
    store.put(handover.NAME, json.dumps({"run": "run1"}).encode())
    until(lambda: folder.asked(handover.NAME) is not None)
    owners.take_over(store, job="job", run="run2", run_folder=folder.url)
    until(lambda: not folder.is_ours)
    folder.close()


class Unwritable:
    """A backend that can be read alone, as one that is full."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def put(self, key: str, parts: Sequence[Bytes], timeout_s: float) -> None:
        raise ConnectionRefusedError


def test_who_is_asked_to_stop_hears_it_where_its_store_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request was looked for once the sign of life was there."""
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 0.02)
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    folder.take_over("run1", "job")
    alive.leave_sign(folder.path)
    unwritable: Any = Unwritable(folder._store.backend)
    folder._store.backend = unwritable
    open_store(folder.url).put(stop_request.NAME, json.dumps({"run": "run1"}).encode())
    until(lambda: folder.asked(stop_request.NAME) is not None, within_s=DEADLINE_S / 2)
    folder.close()
    shutil.rmtree(folder.path, ignore_errors=True)


def test_the_owner_is_looked_at_again_before_a_put_is_repeated() -> None:
    folder = mirrored_by_hand()
    store = open_store(folder.url)

    def lose() -> None:
        owners.take_over(store, job="job", run="run2", run_folder=folder.url)
        store.put("inbox.jsonl", b"of run2\n")
        raise ConnectionResetError

    backend: Any = Interrupted(folder._store.backend, "inbox.jsonl", lose)
    folder._store.backend = backend
    folder.record_inbox({"of": "run1"})
    folder._mirror()
    assert store.get("inbox.jsonl") == b"of run2\n"
    assert not folder.is_ours
    folder.close()


def test_no_step_is_mirrored_before_its_samples() -> None:
    """However many are recorded while the mirror sends: its controller may be killed any time."""
    folder = mirrored_by_hand()
    store = open_store(folder.url)

    def sent(name: str) -> int:
        return store.get(name).count(b"\n") if store.exists(name) else 0

    def be_refused() -> None:
        raise PermissionError

    for number, happens in enumerate([be_refused, lambda: record(folder, 9)]):
        backend: Any = Interrupted(folder._store.backend, "ledger.jsonl", happens)
        folder._store.backend = backend
        record(folder, number)
        with contextlib.suppress(StoreFailed):
            folder.make_durable() if number else folder._mirror()
        assert sent("ledger.jsonl") >= sent("steps.jsonl")
    assert sent("steps.jsonl") == 2
    folder.close()
    assert not folder.mirror_error and sent("steps.jsonl") == sent("ledger.jsonl") == 3


def record(folder: RunFolder, step: int) -> None:
    folder.record_step({"step": step, "generation": 1}, [step])


@pytest.mark.parametrize("upload", ["make_inbox_durable", "_mirror"])
def test_no_inbox_that_begins_anew_is_mirrored_before_the_lines_that_it_is_after(
    upload: str,
) -> None:
    """Nobody could go on from it: its snapshot is of a moment that the record has not reached."""
    folder = mirrored_by_hand()
    store = open_store(folder.url)
    folder._mirror()

    def begin_anew() -> None:
        folder.journal(1.0, "said", 0, "", {})
        record(folder, folder._sequence)
        folder.begin_inbox(1.0, {"type": "Policy"}, {})

    seen: list[tuple[int, int]] = []

    def look() -> None:
        names = ("events.jsonl", "steps.jsonl")
        seen.append(tuple(store.get(name).count(b"\n") for name in names))  # type: ignore[arg-type]

    backend: Any = Interrupted(folder._store.backend, "inbox.jsonl", look)
    if upload == "_mirror":  # after the journal, and before the inbox
        folder.journal(1.0, "said", 0, "", {})
        record(folder, 9)
        backend = Interrupted(backend, "ledger.jsonl", begin_anew)
    else:
        begin_anew()
    folder._store.backend = backend
    getattr(folder, upload)()
    (found,) = seen
    assert found == (folder._sequence, len(read_lines(folder.path / "steps.jsonl")))
    folder.close()


def test_a_file_that_was_replaced_is_mirrored_whatever_its_time_and_size() -> None:
    folder = mirrored_by_hand()
    store = open_store(folder.url)
    for status in ("one", "two"):
        folder.write_result({"status": status})
        os.utime(folder.path / "result.json", (1, 1))
        folder._mirror()
        assert status in store.get("result.json").decode()
    folder.close()


def test_lines_that_come_together_are_written_in_one_go_and_in_order(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    steps = tmp_path / "steps.jsonl"
    with folder.together():
        for step in (1, 2):
            record(folder, step)
        assert not steps.exists()
        folder.flush()
        assert [line["step"] for line in read_lines(steps)] == [1, 2]
        record(folder, 3)
        folder.make_durable()  # what refers to a step comes after its line
        assert [line["step"] for line in read_lines(steps)] == [1, 2, 3]
        record(folder, 4)
    assert [line["step"] for line in read_lines(steps)] == [1, 2, 3, 4]
    folder.close()


def test_what_was_not_written_before_another_took_over_is_not_written_after(
    tmp_path: Path,
) -> None:
    folder = RunFolder(str(tmp_path))
    folder.take_over("run1", "job")
    with pytest.raises(Superseded), folder.together():
        record(folder, 1)
        RunFolder(str(tmp_path)).take_over("run2", "job")
    assert not (tmp_path / "steps.jsonl").exists()


def test_who_was_stopped_while_it_began_replaces_nothing_of_its_successor(tmp_path: Path) -> None:
    """A controller reads and replays for seconds before it rewrites what it has read."""
    first, last = RunFolder(str(tmp_path)), RunFolder(str(tmp_path))
    first.take_over("run1", "job")
    for step in (1, 2):
        record(first, step)
    last.take_over("run2", "job")
    last.journal(1.0, "said", 0, "", {})
    last.record_inbox({"type": "A"})
    (tmp_path / "events.jsonl").open("a").write('{"on its way')
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    replacing: list[Callable[[], None]] = [
        lambda: first.rewrite("events.jsonl", b""),
        lambda: first.rewrite("steps.jsonl", b""),
        lambda: first.truncate(1),
        lambda: first.repair(),
    ]
    for replace in replacing:
        with pytest.raises(Superseded):
            replace()
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    after.pop("steps.1.jsonl")  # a copy beside it
    assert after == before


def test_a_folder_that_was_removed_is_written_to_no_more(tmp_path: Path) -> None:
    """What is there by now, under the same names, is another job's."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.take_over("one", "job")
    folder.record_inbox({"type": "A"})
    shutil.rmtree(tmp_path / "run")
    another = RunFolder(str(tmp_path / "run"))
    another.take_over("two", "job")
    another.record_inbox({"type": "B"})
    with pytest.raises(FileNotFoundError, match="removed") as gone:
        folder.record_inbox({"type": "C"})
    assert folder.was_removed(gone.value)
    assert not folder.was_removed(FileNotFoundError(2, "no", "/elsewhere/inbox.jsonl"))
    assert [line["type"] for line in read_lines(tmp_path / "run" / "inbox.jsonl")] == ["B"]
    another.close()


class Full:
    """A file on a disk that takes some more bytes, and the rest once there is room."""

    def __init__(self, file: Any, takes: int) -> None:
        self._file, self.takes = file, takes

    def write(self, data: bytes) -> int:
        if not self.takes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = int(self._file.write(data[: self.takes]))
        self.takes -= taken
        return taken

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("name", ["inbox.jsonl", "ledger.jsonl"])
def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path, name: str) -> None:
    """A checkpoint that can't be recorded is refused, and the job goes on: with its record."""
    folder = RunFolder(str(tmp_path))
    steps = tmp_path / "steps.jsonl"
    folder.record_inbox({"type": "A"})
    record(folder, 1)
    full = folder._files[name] = Full((tmp_path / name).open("ab", buffering=0), 7)
    with pytest.raises(OSError, match="No space left"), folder.together():
        folder.record_inbox({"type": "B"})
        record(folder, 2)
    recorded = [line["step"] for line in read_lines(steps)]
    assert recorded == ([1] if name == "ledger.jsonl" else [1, 2]), "no step without its samples"
    full.takes = 1 << 20
    record(folder, 3)
    folder.close()
    assert [line["step"] for line in read_lines(steps)] == [1, 2, 3]
    assert [line["step"] for line in read_lines(tmp_path / "ledger.jsonl")] == [1, 2, 3]
    assert [line["type"] for line in read_lines(tmp_path / "inbox.jsonl")] == ["A", "B"]


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_the_result_of_a_complete_job_waits_for_its_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: str
) -> None:
    """It was left out: the job had ended without a result, whoever looked. Who stops one is not
    kept waiting."""
    monkeypatch.setattr(run_folder, "RESULT_AGAIN_S", 0.01)
    url = f"memory://t/{uuid4().hex}"
    folder = RunFolder(url)
    folder.take_over("r1", "job")
    folder._stop_mirror.set()  # what is mirrored is so at the end
    folder.record_step({"step": 1, "generation": 1}, None)
    folder.write_result({"status": status})
    backend: Any = Returning(folder._store.backend, 5)
    folder._store.backend, folder._store.attempts = backend, 1
    folder.close()
    if status == "completed":
        assert b"completed" in open_store(url).get("result.json")
        assert b'"step": 1' in open_store(url).get("steps.jsonl")
        assert owners.newest(open_store(url))[1], "its end is noted"
        assert not folder.path.exists()
        assert "waits for its store" in caplog.text and "lacks" not in caplog.text
    else:
        assert not open_store(url).exists("result.json")
        assert f"what {url} lacks is in {folder.path}: cannot" in caplog.text
        assert (folder.path / "result.json").exists()
        shutil.rmtree(folder.path)


def test_who_stops_a_complete_job_waits_for_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For ten minutes it neither said anything nor heard of a Ctrl-C."""
    monkeypatch.setattr(run_folder, "RESULT_AGAIN_S", 0.01)
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    controller = Controller(JOB, LocalHost({"n0": 1}), folder, f"{tmp_path}/checkpoints")
    folder.take_over("r1", "job")
    folder._stop_mirror.set()
    folder.write_result({"status": "completed"})
    backend: Any = Returning(folder._store.backend, 1 << 30)
    folder._store.backend, folder._store.attempts = backend, 1
    closing = threading.Thread(target=folder.close, daemon=True)
    closing.start()
    until(lambda: "waits for its store unless asked to stop" in caplog.text)
    assert closing.is_alive()
    controller.stop("interrupted")
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert f"what {folder.url} lacks is in {folder.path}: cannot" in caplog.text
    controller._publisher.close()
    shutil.rmtree(folder.path)


def test_controllers_that_follow_on_each_other_soon_make_snapshots(tmp_path: Path) -> None:
    """Each counted from its own first line: with none that lived for long there never was one, and
    each told all again since the job's start."""
    told = list[bool]()
    for number in range(1, 5):
        folder = RunFolder(str(tmp_path))
        folder.take_over(f"run{number}", "job")
        for _ in range(SNAPSHOT_LINES // 2):
            told.append(folder.snapshot_is_due)
            if told[-1]:
                folder.snapshot(1.0, {"type": "Policy"}, {"step": 1}, {"run": "run1"})
            folder.record_inbox({"type": "A", "said": '{"type": "Snapshot"'})
        folder.close()
    assert [n for n, is_due in enumerate(told) if is_due] == [SNAPSHOT_LINES]


def test_data_classes_are_their_fields_in_a_line() -> None:
    """As deep as they lie; what JSON has no number for is null."""
    line = {"refs": ({"ref": CheckpointRef(4, "file:///x", 2)},), "loss": math.nan}
    said = {"refs": [{"ref": {"step": 4, "url": "file:///x", "generation": 2}}], "loss": None}
    assert json.loads(line_of(line)) == said
