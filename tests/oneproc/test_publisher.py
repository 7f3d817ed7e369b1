"""The controller's hand in the store: the record first, then the manifest, then the rest."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from elastic_ft.cli.check_stores import check_checkpoint
from elastic_ft.config import Job, parse_job
from elastic_ft.controller import publisher
from elastic_ft.controller.publisher import Publisher
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage import checkpoints, shards
from elastic_ft.storage.store import Store, open_store

DEADLINE_S = 60.0
JOB = parse_job(
    {
        "name": "job",
        "steps": 100,
        "model": {"preset": "decoder-1m"},
        "data": {"url": "stdlib:"},
        "checkpoint": {"keep_last": 1},
    }
)
TERMS: dict[str, Any] = {}


class Publishing:
    """A publisher at a local store, and what it posts."""

    def __init__(
        self, url: str, run: str, record: Callable[[], None] = lambda: None, job: Job = JOB
    ) -> None:
        self.store, self.run = open_store(url), run
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.publisher = Publisher(job, run, url, self.posted.put, lambda: (), record)
        self.publisher.take_over("runs/x", ())

    def commit(self, step: int, happens: Callable[[], None] = lambda: None) -> Any:
        """The outcome. ``happens``: between the shards and the manifest."""
        prefix = shards.attempt_prefix(self.run, 1, step)
        piece = ("w", Box((0,), (4,)), "float32", memoryview(bytes(16)))
        entries = shards.write_shards(self.store, prefix, 0, [piece])
        command = cmd.CommitCheckpoint(step, 1, tuple(entries), {"w": ("float32", (4,))})
        happens()
        self.publisher.commit(command, "ddp1", TERMS)
        return self.posted.get(timeout=DEADLINE_S)

    def settle(self) -> None:
        """What was submitted so far is read back, and deleted."""
        done = threading.Event()
        self.publisher._deletes.submit(done.set)
        assert done.wait(DEADLINE_S)

    def steps(self) -> list[int]:
        return [ref.step for ref in checkpoints.committed(self.store)]

    def damage(self, step: int) -> None:
        """One bit of a shard, after it was written: its length tells nobody."""
        (key,) = self.store.list(shards.attempt_prefix(self.run, 1, step))
        body = bytearray(self.store.get(key))
        body[3] ^= 1
        self.store.put(key, body)


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[Publishing]:
    one = Publishing(str(tmp_path), "run1")
    yield one
    one.publisher.close()


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    one = RunFolder(f"memory://t/{uuid4().hex}")
    one.take_over("run1", "job")
    yield one
    one.close()


def test_the_record_is_in_the_store_before_a_manifest_is(tmp_path: Path, folder: RunFolder) -> None:
    """A remote folder is mirrored now and then: a killed controller leaves no checkpoint there
    that is ahead of the steps."""
    mirrored = open_store(folder.url)
    recorded: list[int] = []
    one: Publishing

    def record() -> None:
        assert one.steps() == []
        folder.make_durable()
        recorded.append(len(mirrored.get("steps.jsonl").splitlines()))

    one = Publishing(str(tmp_path), "run1", record)
    for step in (1, 2, 3):
        folder.record_step({"step": step, "generation": 1}, [step])
    assert isinstance(one.commit(3), ev.CheckpointCommitted)
    assert (recorded, one.steps()) == ([3], [3])
    assert len(mirrored.get("ledger.jsonl").splitlines()) == 3
    one.publisher.close()


def test_without_the_record_nothing_is_published(tmp_path: Path) -> None:
    def record() -> None:
        raise StoreFailed("cannot write steps.jsonl")

    one = Publishing(str(tmp_path), "run1", record)
    outcome = one.commit(3)
    assert isinstance(outcome, ev.CheckpointFailed)
    assert "cannot write steps.jsonl" in outcome.reason
    assert one.steps() == []
    one.publisher.close()


class Refusing:
    """A backend that is away for manifests, some times; and may have written them all the same."""

    def __init__(self, store: Store, times: int, writes: bool) -> None:
        self._backend, self.left, self._writes = store.backend, times, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        if self.left and key.startswith("manifests/"):
            self.left -= 1
            if self._writes:
                self._backend.create(key, data, timeout_s)
            raise StoreFailed("503 Slow Down")
        return bool(self._backend.create(key, data, timeout_s))


@pytest.mark.parametrize("writes", [False, True])
def test_the_manifest_of_the_last_step_is_tried_again(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """No later one has what it has. That of an earlier step fails: training goes on."""
    monkeypatch.setattr(publisher, "AGAIN_S", 0.01)
    away: Any = Refusing(publishing.store, 2 * checkpoints.PUBLISH_ATTEMPTS, writes)
    publishing.publisher._store.backend = away
    if not writes:
        failed = publishing.commit(3)
        assert isinstance(failed, ev.CheckpointFailed) and "503" in failed.reason
    outcome = publishing.commit(JOB.steps)
    if not writes:
        assert "step 100 is the last, and is published once it can be" in outcome.reason
        outcome = publishing.posted.get(timeout=DEADLINE_S)
    assert isinstance(outcome, ev.CheckpointCommitted)
    assert publishing.steps() == [JOB.steps]


def test_a_controller_that_ends_tries_the_last_manifest_no_more(publishing: Publishing) -> None:
    publishing.publisher._store.backend = Refusing(publishing.store, 10**9, False)  # type: ignore
    assert "is the last" in publishing.commit(JOB.steps).reason
    publishing.publisher.close()
    assert isinstance(publishing.posted.get(timeout=DEADLINE_S), ev.CheckpointFailed)


class Hanging:
    """A backend whose deletes wait until they are let go."""

    def __init__(self, store: Store) -> None:
        self._backend = store.backend
        self.asked, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def delete(self, key: str, timeout_s: float) -> None:
        self.asked.set()
        assert self.let_go.wait(DEADLINE_S)
        self._backend.delete(key, timeout_s)


class HangingCreates(Hanging):
    """The same of what it is to create, so long as the key's name begins with ``kind``."""

    def __init__(self, store: Store, kind: str) -> None:
        super().__init__(store)
        self._kind = kind

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        if key.startswith(self._kind):
            self.asked.set()
            assert self.let_go.wait(DEADLINE_S)
        return bool(self._backend.create(key, data, timeout_s))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_manifest_whose_put_hangs_keeps_no_controller_from_its_end(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Nor does its thread keep the process from its own."""
    monkeypatch.setattr(publisher, "CLOSE_S", 0.5)
    hanging: Any = HangingCreates(publishing.store, "manifests/")
    publishing.publisher._store.backend = hanging
    before = set(threading.enumerate())
    threading.Thread(target=publishing.commit, args=(3,), daemon=True).start()
    assert hanging.asked.wait(DEADLINE_S)
    began = time.monotonic()
    publishing.publisher.close(at_once)
    assert time.monotonic() - began < DEADLINE_S / 4
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    hanging.let_go.set()


def test_a_mount_that_hangs_is_a_failure_in_time(publishing: Publishing, tmp_path: Path) -> None:
    """Nothing was said of it, and who owns the store was asked no more."""
    publishing.publisher._store.deadline_s = 0.5
    pipe = tmp_path / "owners/2"
    os.mkfifo(pipe)  # who opens it to read waits for a writer
    failed = publishing.commit(3)
    pipe.unlink()
    assert isinstance(failed, ev.CheckpointFailed) and "nothing came for" in failed.reason
    assert isinstance(publishing.commit(4), ev.CheckpointCommitted)


def test_a_delete_that_hangs_delays_no_outcome(publishing: Publishing) -> None:
    """Neither of that checkpoint nor of the next; a hung sweep or abandoned attempt neither."""
    backend: Any = Hanging(publishing.store)
    publishing.publisher._store.backend = backend
    publishing.publisher.abandon(cmd.AbandonCheckpoint(1, 1, "no longer wanted"))
    for step in (2, 3, 4):
        assert isinstance(publishing.commit(step), ev.CheckpointCommitted)
    assert backend.asked.wait(DEADLINE_S)
    assert publishing.steps() == [4, 3, 2]
    backend.let_go.set()
    publishing.publisher.close()
    assert publishing.steps() == [4], "and then they are pruned"


def test_no_older_checkpoint_goes_for_one_that_is_damaged(publishing: Publishing) -> None:
    """Published on the lengths of its shards, read back before an older one is deleted."""
    assert isinstance(publishing.commit(1), ev.CheckpointCommitted)
    published = publishing.commit(2, lambda: publishing.damage(2))
    assert isinstance(published, ev.CheckpointCommitted)
    damaged = publishing.posted.get(timeout=DEADLINE_S)
    assert isinstance(damaged, ev.CheckpointDamaged)
    assert (damaged.step, damaged.url) == (2, published.url)
    assert "digest" in damaged.reason
    assert publishing.steps() == [2, 1]
    assert isinstance(publishing.commit(3), ev.CheckpointCommitted)
    publishing.publisher.close()
    assert publishing.steps() == [3], "neither the damaged one nor what is older counts any more"


def test_a_damaged_checkpoint_is_none_of_the_last_that_are_kept(tmp_path: Path) -> None:
    keep = JOB.checkpoint.model_copy(update={"keep_last": 2})
    one = Publishing(str(tmp_path), "run1", job=JOB.model_copy(update={"checkpoint": keep}))
    one.commit(1)
    one.commit(2, lambda: one.damage(2))
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointDamaged)
    one.commit(3)
    one.publisher.close()
    assert one.steps() == [3, 1]


def test_what_can_not_be_read_back_is_neither_damaged_nor_a_reason_to_delete(
    publishing: Publishing,
) -> None:
    publishing.commit(1)
    publishing.settle()
    away: Any = Away()
    publishing.publisher._reading.backend, publishing.publisher._reading.attempts = away, 1
    publishing.commit(2)
    posted = iter(lambda: publishing.posted.get(timeout=DEADLINE_S), None)
    warning = next(item for item in posted if getattr(item, "event", "") == "checkpoint_warning")
    assert "refused" in warning.reason and "no older one is deleted" in warning.reason
    assert publishing.steps() == [2, 1]


def test_what_many_have_written_is_read_back_as_fast_as_they_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else retention waits for hours: the cap is one worker's, the checkpoint is all of theirs."""
    rates: list[float] = []

    class Noted(shards.RateLimit):
        def __init__(self, bytes_per_s: float) -> None:
            rates.append(bytes_per_s)
            super().__init__(bytes_per_s)

    monkeypatch.setattr(checkpoints, "RateLimit", Noted)
    keep = JOB.checkpoint.model_copy(update={"max_upload_mb_per_s": 50.0})
    one = Publishing(str(tmp_path), "run1", job=JOB.model_copy(update={"checkpoint": keep}))
    prefix, entries = shards.attempt_prefix("run1", 1, 2), []
    for rank in range(4):
        piece = ("w", Box((rank,), (1,)), "float32", memoryview(bytes(4)))
        entries += shards.write_shards(one.store, prefix, rank, [piece])
    command = cmd.CommitCheckpoint(2, 1, tuple(entries), {"w": ("float32", (4,))})
    one.publisher.commit(command, "ddp4", TERMS)
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    one.settle()
    one.publisher.close()
    assert rates == [4 * 50e6]


def test_reading_back_may_be_left_out(tmp_path: Path) -> None:
    keep = JOB.checkpoint.model_copy(update={"read_back": False})
    one = Publishing(str(tmp_path), "run1", job=JOB.model_copy(update={"checkpoint": keep}))
    one.commit(1)
    one.commit(2, lambda: one.damage(2))
    one.publisher.close()
    assert one.steps() == [2] and one.posted.empty()


class Unread:
    """A backend from which nothing comes until it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        def wait(*_: Any, **__: Any) -> Any:
            self.asked.set()
            assert self.let_go.wait(DEADLINE_S)
            raise ConnectionError("too late")

        return wait


def test_who_is_asked_to_stop_waits_for_no_reading(publishing: Publishing) -> None:
    unread: Any = Unread()
    publishing.publisher._reading._calls._backend = unread
    publishing.commit(1)
    assert unread.asked.wait(DEADLINE_S)
    began = time.monotonic()
    publishing.publisher.close(at_once=True)
    assert time.monotonic() - began < DEADLINE_S / 4
    unread.let_go.set()
    note = publishing.posted.get(timeout=DEADLINE_S)
    assert "step 1 was not read back" in note.reason


def test_who_is_asked_to_stop_waits_for_no_rate_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four objects, of which each but the first is due 25 s after the one before. The threads that
    wait for that keep a process alive for as long."""
    before, paced = set(threading.enumerate()), threading.Semaphore(0)

    class Noted(shards.RateLimit):
        def wait(self, *args: Any) -> None:
            paced.release()
            super().wait(*args)

    monkeypatch.setattr(checkpoints, "RateLimit", Noted)
    keep = JOB.checkpoint.model_copy(update={"max_upload_mb_per_s": 0.04e-6})  # 0.16 B/s for all
    one = Publishing(str(tmp_path), "run1", job=JOB.model_copy(update={"checkpoint": keep}))
    entries: list[dict[str, Any]] = []
    for rank in range(4):
        piece = ("w", Box((rank,), (1,)), "float32", memoryview(bytes(4)))
        prefix = shards.attempt_prefix("run1", 1, 2)
        entries += shards.write_shards(one.store, prefix, rank, [piece])
    command = cmd.CommitCheckpoint(2, 1, tuple(entries), {"w": ("float32", (4,))})
    one.publisher.commit(command, "ddp4", TERMS)
    assert isinstance(one.posted.get(timeout=DEADLINE_S), ev.CheckpointCommitted)
    for _ in range(4):
        assert paced.acquire(timeout=DEADLINE_S)
    began = time.monotonic()
    one.publisher.close(at_once=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
    assert time.monotonic() - began < 20.0, "less than one object's wait"
    assert "step 2 was not read back" in one.posted.get(timeout=DEADLINE_S).reason


class Away:
    """A backend that no operation reaches."""

    def __getattr__(self, name: str) -> Any:
        def refused(*_: Any, **__: Any) -> Any:
            raise ConnectionError("refused")

        return refused


def test_who_is_superseded_says_so_and_publishes_nothing(publishing: Publishing) -> None:
    assert isinstance(publishing.commit(2), ev.CheckpointCommitted)
    other = Publishing(publishing.store.url, "run2")
    assert other.publisher.unrescued == ("run1",)
    assert isinstance(publishing.commit(3), Superseded)
    publishing.publisher.look()
    assert isinstance(publishing.posted.get(timeout=DEADLINE_S), Superseded)
    piece = ("w", Box((0,), (4,)), "float32", memoryview(bytes(16)))
    shards.write_shards(other.store, shards.attempt_prefix("run2", 1, 3), 0, [piece])
    before = other.store.list()
    publishing.publisher.sweep()
    assert isinstance(publishing.posted.get(timeout=DEADLINE_S), Superseded)
    assert other.store.list() == before
    assert isinstance(other.commit(4), ev.CheckpointCommitted)
    other.publisher.close()


def test_who_is_superseded_forgets_nobody(publishing: Publishing) -> None:
    """It was stopped while it rescued a run, which its successor rescues now."""
    publishing.store.put("emergency/run0/n0/begun", b"{}")
    other = Publishing(publishing.store.url, "run2")
    with pytest.raises(Superseded):
        publishing.publisher.forget("run0")
    assert other.publisher.emergencies() == ("run1", "run0")
    other.publisher.close()


def test_what_a_sweep_could_not_do_is_told(publishing: Publishing) -> None:
    assert isinstance(publishing.commit(3), ev.CheckpointCommitted)
    (key,) = publishing.store.list("manifests")
    publishing.store.put(key, b"no manifest")
    publishing.publisher.sweep()
    publishing.settle()
    told = publishing.posted.get_nowait()
    assert told.event == "checkpoint_warning"
    assert "abandoned data was not swept" in told.reason


def test_a_first_look_takes_what_counts_alone(publishing: Publishing, tmp_path: Path) -> None:
    """Before anything is decided: a late manifest of an earlier owner is ahead of what counts."""
    other = Publishing(publishing.store.url, "run2")
    assert other.publisher.resumable() == ()
    publishing.publisher.claim.check = lambda: None  # type: ignore[method-assign]  # it had looked
    assert isinstance(publishing.commit(9), ev.CheckpointCommitted)
    assert isinstance(other.commit(4), ev.CheckpointCommitted)
    look = Publisher(JOB, "run3", publishing.store.url, lambda _: None, lambda: (), lambda: None)
    assert [ref.step for ref in look.resumable()] == [4]
    check_checkpoint(publishing.store.url, {}, {}, 4)
    look.close()
    other.publisher.close()
