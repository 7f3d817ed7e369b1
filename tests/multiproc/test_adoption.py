"""Controllers die, workers train on: the next controller adopts them, and nothing shows it.

Two controllers in one process share a host: what the first one started lives on when it is killed,
which is to say when its connections are cut without a word and its thread does nothing any more.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chaos.s3_server import s3_server
from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.controller.inheritance import Inheritance
from elastic_ft.controller.job_policy import policy_of
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.takeover import FOR_ONE_START
from elastic_ft.core.assignment import KEEPER, WorkerId
from elastic_ft.errors import Superseded
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe import replay
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.observe.segments import read_whole
from elastic_ft.storage.store import open_store
from elastic_ft.transport.tls import new_key
from tests.multiproc.harness import PACED, RUN_DEADLINE_S, Run, make_job
from tests.waiting import until

Where = Callable[[Controller, Any], bool]


class Killed(BaseException):
    """In place of SIGKILL: nothing of ours catches it."""


class KeepingHost(LocalHost):
    """Its processes are nobody's: controllers come and go."""

    left = 0

    def survivors(self) -> frozenset[WorkerId]:
        with self._lock:
            keepers = [n for n in self._nodes.values() if n.keeper and n.keeper.is_alive()]
            return frozenset([*self.alive(), *(KEEPER + node.name for node in keepers)])

    def start(self, inbox: Any, address: Any, key: Any) -> None:
        if self._inbox is None:
            super().start(inbox, address, key)
        with self._lock:
            self._inbox, self._address = inbox, address

    def leave(self) -> None:
        self.left += 1


@dataclass
class Reign:
    """One controller: how it is to end, and how it did."""

    controller: Controller
    until: Where
    error: BaseException | None = None
    result: dict[str, Any] = field(default_factory=dict)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def begin(self) -> Reign:
        heard = self.controller._hearing.handle

        def handle(item: Any) -> None:
            if self.until(self.controller, item):
                self._die()
            heard(item)

        self.controller._handle = handle  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self.result = self.controller.run()
        except BaseException as error:
            self.error = error

    def _die(self) -> None:
        """No line more, no word to anyone, and nobody is ended."""
        controller = self.controller
        controller._close = lambda: None  # type: ignore[method-assign]
        folder = controller.run_folder
        folder._unwritten = {}
        folder._flush = lambda: None  # type: ignore[method-assign]
        folder._stop_mirror.set()
        controller._durability.close()
        controller._connections.close()
        controller.metrics.close()
        raise Killed


@dataclass
class Realm:
    """A job, its host, and one controller after the other."""

    job: Job
    url: str
    host: KeepingHost = field(init=False)
    reigns: list[Reign] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = KeepingHost({f"n{i}": 1 for i in range(self.job.elastic.max_workers)})
        self.key = new_key(tls=False)

    def reign(self, until: Where = lambda *_: False, faults: tuple[PointFault, ...] = ()) -> Reign:
        folder = RunFolder(self.url)
        checkpoints = f"{folder.url}/checkpoints"
        controller = Controller(
            self.job, self.host, folder, checkpoints, key=self.key, faults=faults
        )
        reign = Reign(controller, until)
        self.reigns.append(reign)
        return reign.begin()

    def run(self, *untils: Where, faults: tuple[PointFault, ...] = ()) -> dict[str, Any]:
        """A controller that ends at each of these, and one that ends with the job."""
        for where in untils:
            reign = self.reign(where, faults)
            reign.thread.join(RUN_DEADLINE_S)
            assert isinstance(reign.error, Killed), (reign.error, reign.result)
        last = self.reign(faults=faults)
        last.thread.join(RUN_DEADLINE_S)
        assert last.error is None and last.result, last.error
        return last.result


@pytest.fixture
def realms() -> Iterator[Callable[..., Realm]]:
    made: list[Realm] = []

    def make(*args: Any, **sections: Any) -> Realm:
        made.append(Realm(*args, **sections))
        return made[-1]

    yield make
    for realm in made:
        LocalHost.close(realm.host)
        for reign in realm.reigns:
            reign.controller._publisher.close(at_once=True)
            reign.thread.join(10)


def job_of(strategy: str = "ddp", workers: int = 2, steps: int = 40, **sections: Any) -> Job:
    elastic = {"min_workers": 1, "heartbeat_timeout_s": 10.0} | sections.pop("elastic", {})
    return make_job(strategy, workers=workers, steps=steps, elastic=elastic, **sections)


def at_step(step: int) -> Where:
    return lambda controller, _: controller.state.committed >= step


def in_phase(phase: str, after: int = 3) -> Where:
    def until(controller: Controller, _: Any) -> bool:
        return controller.state.phase == phase and controller.state.committed >= after

    return until


def finished(realm: Realm, result: dict[str, Any]) -> Run:
    return Run(realm.job, Path(realm.url), result)


def check_made_up(run: Run, copy: Path) -> None:
    """What was decided and not written is, and what its journal does not have goes."""
    for lost, more in ((0, 1), (1, 0), (7, 0), (40, 0)):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("owners", "checkpoints"))
        for name in ("steps.jsonl", "ledger.jsonl", "events.jsonl"):
            lines = (copy / name).read_bytes().splitlines(keepends=True)
            kept = lines[: max(1, len(lines) - lost)] + [lines[-1].replace(b"40", b"41")] * more
            (copy / name).write_bytes(b"".join(kept) + b'{"torn')
        folder = RunFolder(str(copy))
        folder.take_over("next", run.job.name)
        folder.truncate(run.job.steps + 1)
        folder.repair()
        observer = Observer(run.job, policy_of(run.job), folder)
        inheritance = Inheritance(run.job, folder, observer)
        heritage = inheritance.find(run.job.model_dump(mode="json", exclude=FOR_ONE_START))
        made_up = inheritance.repair(heritage)
        assert made_up["steps"] == min(lost, run.job.steps - 1), (lost, more, made_up)
        folder.close()
        for name in ("steps.jsonl", "ledger.jsonl", "events.jsonl"):
            # Its end is written anew once all of it is known.
            written = [x for x in plain(run.path / name) if x.get("event") != "finished"]
            assert plain(copy / name) == written, (name, lost, more)


def plain(path: Path) -> list[dict[str, Any]]:
    """Without the times at which lines were written."""
    times = ("at_s", "committed_at_s")
    return [{k: v for k, v in line.items() if k not in times} for line in read_lines(path)]


def check_adopted(run: Run, times: int, *, generations: int = 1) -> None:
    """Contiguous, each once, by the same processes; and the whole of it can be told again."""
    run.check()
    assert [line["step"] for line in run.steps] == list(range(1, run.job.steps + 1)), run.story()
    assert len(run.all("in_charge")) == times, run.story()
    assert len(run.all("generation_formed")) == generations, run.story()
    assert [line["seq"] for line in run.events] == list(range(len(run.events)))
    verdict = replay.check_replay(run.path)
    assert not verdict.difference, f"{run.story()}\n{verdict.difference}"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_controllers_in_a_row_are_killed_and_nothing_shows_it(
    tmp_path: Path, realms: Callable[..., Realm], strategy: str
) -> None:
    plain = realms(job_of(strategy), str(tmp_path / "plain"))
    undisturbed = finished(plain, plain.run())
    realm = realms(job_of(strategy), str(tmp_path / "run"))
    check_made_up(undisturbed, tmp_path / "copy")
    run = finished(realm, realm.run(at_step(8), at_step(20)))
    check_adopted(run, 2)
    assert run.losses() == undisturbed.losses()
    assert run.result["state_digest"] == undisturbed.result["state_digest"]
    assert run.result["recoveries"] == []


def kill_worker_0(realm: Realm) -> None:
    realm.host.kill_worker("w0")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_controller_and_a_worker_at_the_same_moment(
    tmp_path: Path, realms: Callable[..., Realm], strategy: str
) -> None:
    realm = realms(job_of(strategy, workers=3, steps=40), str(tmp_path / "run"))

    def both(controller: Controller, _: Any) -> bool:
        if controller.state.committed < 6:
            return False
        kill_worker_0(realm)
        return True

    run = finished(realm, realm.run(both))
    run.check()
    assert [line["step"] for line in run.steps] == list(range(1, 41)), run.story()
    assert [r["cause"] for r in run.recoveries][:1] == ["worker_lost"], run.story()
    assert run.recoveries[0]["steps_lost"] == 0 and run.recoveries[0]["survivors_kept_pid"]
    assert not replay.check_replay(run.path).difference


@pytest.mark.parametrize("phase", ["pausing", "forming"])
def test_a_controller_is_killed_while_a_generation_ends_or_forms(
    tmp_path: Path, realms: Callable[..., Realm], phase: str
) -> None:
    realm = realms(job_of("fsdp", workers=3, steps=30), str(tmp_path / "run"))
    faults = (PointFault("backward", rank=1, step=5),)
    run = finished(realm, realm.run(in_phase(phase), faults=faults))
    run.check()
    assert [line["step"] for line in run.steps] == list(range(1, 31)), run.story()
    assert run.recoveries[0]["steps_lost"] == 0, run.story()
    assert run.result["faults_fired"] == [0], "the next controller knows of it"
    assert not replay.check_replay(run.path).difference


def test_one_that_was_stopped_wakes_up_and_leaves(
    tmp_path: Path, realms: Callable[..., Realm]
) -> None:
    """Its connections stay open: its workers hear of the other from the store, by its silence."""
    elastic = {"heartbeat_timeout_s": 1.0}
    realm = realms(job_of("ddp", steps=80, data=PACED, elastic=elastic), str(tmp_path / "run"))
    awake, asleep = threading.Event(), threading.Event()

    def stopped(controller: Controller, _: Any) -> bool:
        if controller.state.committed >= 5 and not asleep.is_set():
            asleep.set()
            assert awake.wait(RUN_DEADLINE_S)
        return False

    first = realm.reign(stopped)
    assert asleep.wait(RUN_DEADLINE_S)
    last = realm.reign()
    until(lambda: last.controller.state.committed > 20 or last.error is not None)
    awake.set()
    first.thread.join(RUN_DEADLINE_S)
    assert isinstance(first.error, Superseded), first.error
    assert realm.host.left == 1, "it killed nobody"
    last.thread.join(RUN_DEADLINE_S)
    assert last.error is None, last.error
    run = finished(realm, last.result)
    check_adopted(run, 1)


def test_with_a_run_folder_in_an_object_store(
    tmp_path: Path, realms: Callable[..., Realm], monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket}/run"
        realm = realms(job_of(steps=150), url)
        result = realm.run(at_step(30))
        store = open_store(url)
        for name in ("events.jsonl", "inbox.jsonl", "steps.jsonl", "ledger.jsonl"):
            (tmp_path / name).write_bytes(read_whole(store, name))
        run = Run(realm.job, tmp_path, result)
        check_adopted(run, 1)
