"""The start of a controller after one that was killed: wherever it is killed itself, and however
often, the next one finds all that keepers have saved."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.controller.controller import Controller
from elastic_ft.controller.host import Host
from elastic_ft.controller.rescue import INCOMPLETE
from elastic_ft.controller.takeover import KEEPERS_BEGIN_S
from elastic_ft.core.assignment import CheckpointRef, Keeper
from elastic_ft.core.commands import FinishJob, RecordStep
from elastic_ft.core.events import JobStarted, StopRequested
from elastic_ft.errors import StoreFailed, UsageError
from elastic_ft.keeper import emergency
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.keeper.node_keeper import NodeKeeper
from elastic_ft.keeper.protocol import Sealed
from elastic_ft.observe import alive
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.storage import checkpoints, owners
from elastic_ft.storage.store import Store, open_store
from elastic_ft.transport.tls import JobKey
from tests.multiproc.harness import make_job
from tests.oneproc.test_emergency import RUN, Failing, Killed, keeper, shard
from tests.storage.test_owners import signed

JOB = make_job("fsdp", workers=2)
RECORDED, SAVED = 5, 7


class NoHost(Host):
    """Nothing is ever started: what is of interest ends before."""

    def start(self, *_: Any) -> None:
        return

    def close(self, keepers_s: float = 0.0) -> None:
        return

    def kill_worker(self, worker: str) -> None:
        raise AssertionError(worker)


class KilledSomewhere(Failing):
    """As ``Failing``, of what the controller's own thread asks for, and those that help it."""

    def __getattr__(self, name: str) -> Any:
        call, direct = super().__getattr__(name), getattr(self._inner, name)
        return direct if threading.current_thread().name.startswith("checkpoint-") else call


def killed_before(folder: Path) -> Store:
    """Controller RUN recorded RECORDED steps, and was killed; its keepers have SAVED ones."""
    run = RunFolder(str(folder))
    run.take_over(RUN, JOB.name)
    for step in range(1, RECORDED + 1):
        line = {"step": step, "generation": 1, "world_size": 2, "loss": 1 / step}
        run.record_step(line, None)
    served = {"run": RUN, "port": 1}
    run.journal(1.0, "metrics_served", 0, "as any controller", served)
    run.journal(1.0, "keeper_ready", 0, "as any keeper", {"node": "n0"})
    run.close()
    store = open_store(str(folder / "checkpoints"))
    owners.take_over(store, job=JOB.name, run=RUN, run_folder=str(folder))
    save_everything(store)
    return store


def save_everything(store: Store) -> None:
    told = range(RECORDED - 1, SAVED + 1)
    held = [shard(step, number, told=told) for step in (6, SAVED) for number in (0, 1)]
    emergency.begin(store, RUN, keeper("n0"), "n0")
    assert emergency.save(store, RUN, keeper("n0"), held, stale_s=0.01) == ()


@contextmanager
def starting(folder: Path) -> Iterator[Controller]:
    url = str(folder / "checkpoints")
    controller = Controller(JOB, NoHost(), RunFolder(str(folder)), url)  # type: ignore[arg-type]
    controller.metrics.serve = lambda *_: 1  # type: ignore[method-assign]
    try:
        yield controller
    finally:
        controller._close()


def start(folder: Path) -> tuple[CheckpointRef, ...] | None:
    with starting(folder) as controller:
        return controller._open()


def fail_at(controller: Controller, *at: int) -> KilledSomewhere:
    store = controller._publisher._store
    failing = store.backend = KilledSomewhere(store.backend, at, Killed())  # type: ignore[assignment]
    return failing


def has_everything(folder: Path, found: tuple[CheckpointRef, ...] | None, starts: int = 0) -> None:
    assert found and found[0].step == SAVED, found
    steps = [line["step"] for line in read_lines(folder / "steps.jsonl")]
    assert steps == list(range(1, SAVED + 1))
    assert open_store(str(folder / "checkpoints")).list("emergency") == []
    begun = [e for e in read_lines(folder / "events.jsonl") if e["event"] == "job_started"]
    assert len(begun) == starts, "nobody has begun to train"


def test_what_keepers_saved_is_recorded_then_published_then_forgotten(tmp_path: Path) -> None:
    killed_before(tmp_path)
    found = start(tmp_path)
    has_everything(tmp_path, found)
    journal = read_lines(tmp_path / "events.jsonl")
    told = [line["event"] for line in journal]
    assert told.index("emergency_awaited") < told.index("emergency_checkpoint")
    (awaited,) = [line for line in journal if line["event"] == "emergency_awaited"]
    said = r"the keepers of n0 may save what they hold: they have \d+ s to begin, 600 s in all"
    assert re.fullmatch(said, awaited["reason"]), awaited["reason"]
    has_everything(tmp_path, start(tmp_path))  # and there is nothing to be found a second time


def test_killed_at_any_operation_the_next_controller_finds_everything(tmp_path: Path) -> None:
    killed_before(tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "count")
    with starting(tmp_path / "count") as controller:
        counting = fail_at(controller)
        controller._open()
        count = counting.count
    assert count > 20
    for at in range(count):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "killed", folder)
        with starting(folder) as controller:
            fail_at(controller, at)
            with pytest.raises(Killed):
                controller._open()
        has_everything(folder, start(folder))


@pytest.mark.parametrize("at", [0, 1])
def test_killed_while_it_records_the_next_controller_finds_everything(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_before(tmp_path)
    recorded: list[RecordStep] = []
    with starting(tmp_path) as controller:
        record_step = controller._observer.step

        def record(command: RecordStep) -> None:
            if len(recorded) == at:
                raise Killed
            recorded.append(command)
            record_step(command)

        monkeypatch.setattr(controller._observer, "step", record)
        with pytest.raises(Killed):
            controller._open()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 7, "gen')  # torn
    has_everything(tmp_path, start(tmp_path))


def test_what_can_not_be_put_together_yet_stays_until_a_checkpoint_is_newer(
    tmp_path: Path,
) -> None:
    """n1, whose keeper would have the other shard, comes too late; a second start finds it."""
    store = killed_before(tmp_path)
    for key in store.list(f"emergency/{RUN}"):
        if "pp0.s1.tp0" in key:
            store.delete(key)
    first = start(tmp_path)
    assert first == () or first is None
    journal = read_lines(tmp_path / "events.jsonl")
    (incomplete,) = [line for line in journal if line["event"] == "emergency_incomplete"]
    assert incomplete["reason"] == "not all shards of steps 6, 7 are saved"
    late = emergency.keeper_name("n1", "1")
    emergency.begin(store, RUN, late, "n1")
    told = range(RECORDED - 1, SAVED + 1)
    assert emergency.save(store, RUN, late, [shard(SAVED, 1, told=told)], stale_s=0.01) == ()
    has_everything(tmp_path, start(tmp_path))


def test_keepers_that_would_have_come_long_ago_are_not_waited_for(tmp_path: Path) -> None:
    """The whole machine was started again, with all that was on it."""
    killed_before(tmp_path)
    store = open_store(str(tmp_path / "checkpoints"))
    store.delete(f"emergency/{RUN}")
    leave_sign(tmp_path, ago_s=1000)
    began_s = time.monotonic()
    assert start(tmp_path) == ()
    assert time.monotonic() - began_s < 15, "KEEPERS_BEGIN_S, and a heartbeat timeout"
    (line,) = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == INCOMPLETE]
    assert line["reason"] == "the keepers of n0 have said nothing"


def test_keepers_of_a_controller_that_died_while_it_was_asked_to_hand_over_are_awaited(
    tmp_path: Path,
) -> None:
    """Its last sign of life is younger than this start."""
    store = killed_before(tmp_path)
    store.delete(f"emergency/{RUN}")
    leave_sign(tmp_path, ago_s=1000)
    with starting(tmp_path) as controller:
        leave_sign(tmp_path, ago_s=0)
        late = threading.Timer(0.5, save_everything, (store,))
        late.start()
        found = controller._open()
        late.join()
    assert found and found[0].step == SAVED


@pytest.mark.parametrize("status", ["stopped", "failed", "completed"])
def test_what_no_checkpoint_has_is_saved_however_the_job_ends(tmp_path: Path, status: str) -> None:
    """Of a suspended job nobody is left who could write a checkpoint."""
    with starting(tmp_path) as controller:
        host: Any = OneKeeper(controller.run_id)
        controller.host = controller._executor.host = host
        controller._handle(JobStarted(time.time(), controller._open() or (), 0, 0))
        while not controller.state.keepers:
            controller._turn()
        for step in range(1, SAVED + 1):
            controller._observer.step(RecordStep(step, 1, 2, "fsdp2", {"loss": 1 / step}))
        controller.state = replace(controller.state, phase="suspended", committed=SAVED)
        if status == "stopped":
            controller._handle(StopRequested(time.time(), "another start takes over"))
        else:
            controller._executor.finish = FinishJob(status, "as the core has it")
        assert controller._finish is not None and controller._finish.status == status
        controller._close()
        result = controller._result(controller._finish)
    assert host.ended
    if status == "completed":
        assert start(tmp_path) == () and "saved" not in result["reason"]
    else:
        assert result["reason"].endswith(
            f"; keepers have saved step {SAVED}, where the next start begins"
        )
        has_everything(tmp_path, start(tmp_path), starts=1)
    journal = read_lines(tmp_path / "events.jsonl")
    assert "controller_restarted" not in [line["event"] for line in journal]


def test_a_store_that_was_away_was_so_for_keepers_too(tmp_path: Path) -> None:
    """They come as soon as it is back, however long their controller is gone by then."""
    killed_before(tmp_path)
    leave_sign(tmp_path, ago_s=1000)
    with starting(tmp_path) as controller:
        resumable, tries = controller._publisher.emergencies, iter([True, False])

        def emergencies() -> tuple[str, ...]:
            if next(tries):
                raise StoreFailed("away")
            assert controller._takeover._keepers_begin_s() >= KEEPERS_BEGIN_S
            return resumable()

        controller._publisher.emergencies = emergencies  # type: ignore[method-assign]
        has_everything(tmp_path, controller._open())


@pytest.mark.parametrize("late", [False, True])
def test_keepers_save_for_a_start_with_another_run_folder_too(tmp_path: Path, late: bool) -> None:
    """The folder was lost with the controller's machine: only the checkpoint URL is left."""
    store = killed_before(tmp_path)
    if late:
        store.delete(f"emergency/{RUN}")
    earlier = SimpleNamespace(number=1, owner=SimpleNamespace(run=RUN))
    checkpoints.publish(store, replace(signed(store, 3, earlier), job=JOB.name))  # type: ignore[arg-type]
    other = RunFolder(str(tmp_path / "other"))
    controller = Controller(JOB, NoHost(), other, store.url)  # type: ignore[arg-type]
    controller.metrics.serve = lambda *_: 1  # type: ignore[method-assign]
    timer = threading.Timer(0.5, save_everything, (store,))
    if late:
        timer.start()
    found = controller._open()
    controller._close()
    timer.cancel()
    assert found and found[0].step == SAVED
    steps = [line["step"] for line in read_lines(other.path / "steps.jsonl")]
    assert steps == list(range(4, SAVED + 1))


def test_what_an_earlier_version_saved_is_not_deleted(tmp_path: Path) -> None:
    store = killed_before(tmp_path)
    store.delete(f"emergency/{RUN}")
    store.put(f"emergency/{RUN}/n0.begun", b"")
    store.put(f"emergency/{RUN}/n0.json", b'[{"step": 7}]')
    before = store.list("emergency")
    with pytest.raises(UsageError, match="was saved by an earlier version: resume once with that"):
        start(tmp_path)
    assert store.list("emergency") == before


class OneKeeper(NoHost):
    """Its worker, before it was gone, sealed both shards of step SAVED."""

    def __init__(self, run: str) -> None:
        self._run, self.ended = run, False

    def start(self, post: Any, controller: tuple[str, int], key: JobKey) -> None:
        keeper = NodeKeeper(controller, key, "n0", "127.0.0.1")
        self._serving = threading.Thread(target=keeper.serve, daemon=True)
        self._serving.start()
        address = ("127.0.0.1", keeper._reception.port)
        self._worker = KeeperClient(Keeper("n0", address), key, "w0")
        for number in (0, 1):
            held = shard(SAVED, number, run=self._run)
            path, memory = self._worker.allocate(held.buffer.nbytes)
            memory[:] = memoryview(held.buffer)
            self._worker.tell(Sealed(path, held.holding, held.schema, ()))

    def want_workers(self, total: int) -> None:
        return

    def close(self, keepers_s: float = 0.0) -> None:
        if not self.ended:
            self._worker.close()
            self._serving.join(max(keepers_s, 10.0))
            self.ended = not self._serving.is_alive()


def leave_sign(folder: Path, ago_s: float) -> None:
    nobody = 2**22 + 1  # more than Linux gives to any process
    sign = alive.Sign(time.time() - ago_s, os.uname().nodename, nobody)
    (folder / alive.NAME).write_text(json.dumps(asdict(sign)))
