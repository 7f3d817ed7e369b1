"""A trial: one job on a cluster, run in a thread and watched through its run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.train import Result

from elastic_ft.core.invariants import Expected, check_run
from elastic_ft.hosts.ray.trainer import ElasticTrainer
from elastic_ft.observe.run_reader import Tail

NODES = 4
START_S = 180.0  # cold workers on two shared cores
SOON_S = 120.0
PAUSE_S = 0.1  # for each micro-batch, of which a worker has one to four in a step
# Workers train on while others start: the smaller their steps, the more is left for those.
SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64}
Line = dict[str, Any]


def job(name: str, **sections: Any) -> dict[str, Any]:
    """A tiny job that goes on until it is stopped. Its steps wait for their data, so that whoever
    starts meanwhile has the processors."""
    return {
        "name": name,
        "steps": 100_000,
        "model": {"preset": "decoder-1m", "kwargs": SMALL},
        "data": {"path": "chaos.jobs:Paced", "kwargs": {"pause_s": PAUSE_S}},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "snapshot": {"every_steps": 1},
        "elastic": {"min_workers": 1, "max_workers": NODES, "gather_s": 60},
        "audit": True,
        **sections,
    }


class Growing:
    """The lines of a file, of which each look reads what is new, unless the file was replaced."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._inode = folder / name, 0
        self._tail, self._lines = Tail(str(folder), name), list[Line]()

    def lines(self) -> list[Line]:
        while True:
            if (inode := self._inode_now()) != self._inode:
                self._tail, self._lines = Tail(str(self._path.parent), self._path.name), []
                self._inode = inode
            self._lines += self._tail.read()
            if self._inode_now() == inode:  # else, which of the two was read?
                return list(self._lines)

    def _inode_now(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_ino
        return 0


class Seen:
    """A job as its run folder tells of it."""

    folder: Path

    @functools.cached_property
    def _files(self) -> dict[str, Growing]:
        return {}

    def lines(self, name: str) -> list[Line]:
        return self._files.setdefault(name, Growing(self.folder, name)).lines()

    def events(self, event: str) -> list[Line]:
        return [line for line in self.lines("events.jsonl") if line["event"] == event]

    @property
    def step(self) -> int:
        steps = self.lines("steps.jsonl")
        return int(steps[-1]["step"]) if steps else 0

    def members(self) -> list[Line]:
        return list(self.events("generation_formed")[-1]["members"])


class Trial(Seen):
    """A job on the cluster: ``fit`` runs in a thread, progress is read from the run folder."""

    def __init__(self, trainer: ElasticTrainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="fit", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self.result = self.trainer.fit()
        except BaseException as error:
            self.error = error

    def pids(self) -> set[int]:
        return {member["pid"] for member in self.members()}

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = SOON_S) -> None:
        """Returns once ``condition`` holds; otherwise prints the journal and fails."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s or not self._thread.is_alive():
                self.print_journal()
                ended = "" if self._thread.is_alive() else f"; the job has ended: {self.error!r}"
                pytest.fail(f"{what}: not within {timeout_s:g} s{ended}")
            time.sleep(0.02)

    def wait_for_world(self, size: int, steps: int = 5, timeout_s: float = SOON_S) -> None:
        """Until ``steps`` more steps are committed by a world of ``size``."""
        start = self.step

        def grown() -> bool:
            recent = self.lines("steps.jsonl")[-steps:]
            return self.step >= start + steps and all(s["world_size"] == size for s in recent)

        self.wait(f"{steps} steps by {size} workers", grown, timeout_s)

    def wait_for_generation(self, size: int, timeout_s: float = SOON_S) -> set[int]:
        """Until there is one of ``size``, or was: a lost worker may be replaced within a moment.
        Returns the pids of the newest."""
        found: list[Line] = []

        def formed() -> bool:
            found[:] = [g for g in self.events("generation_formed") if len(g["members"]) == size]
            return bool(found)

        self.wait(f"a generation of {size} workers", formed, timeout_s)
        return {member["pid"] for member in found[-1]["members"]}

    def print_journal(self) -> None:
        for line in self.lines("events.jsonl"):
            print(json.dumps(line))
        print("last steps:", self.lines("steps.jsonl")[-3:])

    def stop(self) -> Result:
        self.trainer.stop("the test has seen enough")
        return self.join()

    def join(self, timeout_s: float = SOON_S) -> Result:
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self.result is None:
            self.print_journal()
            pytest.fail(f"no result: {self.error!r}")
        return self.result

    def check(self) -> None:
        """No invariant is contradicted by what the run folder shows."""
        result = json.loads((self.folder / "result.json").read_text())
        violations = check_run(
            self.lines("events.jsonl"),
            self.lines("steps.jsonl"),
            self.lines("ledger.jsonl"),
            result,
            Expected(seed=0, global_batch_size=8),
        )
        if violations:
            self.print_journal()
        assert violations == []

    def abandon(self) -> None:
        for _ in range(2):
            self.trainer.stop("the test is over")
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
