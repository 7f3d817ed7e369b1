"""Runs tiny jobs on real processes, and reads what their run folders say.

Faults are keyed to progress (a named point, a world size, an earlier fault), never to time. A
deadline ends a run that hangs, and every assertion can print the run's story.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ft.config import Job, parse_job
from elastic_ft.controller.controller import Controller
from elastic_ft.core.invariants import Expected, check_run
from elastic_ft.core.state import State
from elastic_ft.data.dataset import open_dataset
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local import LocalHost
from elastic_ft.hosts.local.local_host import LocalNode
from elastic_ft.observe.run_folder import RunFolder, read_lines
from elastic_ft.storage.store import open_store
from tests.observe.undeclared import undeclared

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.005
RUN_DEADLINE_S = 150.0
PATIENT = {"heartbeat_timeout_s": 10.0}  # where no worker hangs: a busy machine is no fault
LOSS_TOLERANCE = 1e-4  # relative, between any two runs of one job (I3)
STEPS_HELD_OPEN = 1  # committed by a shrunk world before it waits to be whole again

Sections = dict[str, dict[str, Any]]
CORPUS = {"url": "stdlib:", "vocab_size": 300, "sequence_length": 16, "max_tokens": 40_000}
# Of a job that goes on until somebody else has started, or was silent for long: at full speed its
# workers would have the processors all the while.
PACED = {"path": "chaos.jobs:Paced", "kwargs": {"pause_s": 0.02}}


def make_job(strategy: str = "ddp", *, steps: int = 12, workers: int = 4, **sections: Any) -> Job:
    """A tiny job; ``sections`` are laid over its own, key by key."""
    values: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "steps": steps,
        "audit": True,
        "model": {
            "preset": "decoder-1m",
            "kwargs": {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32},
        },
        "data": dict(CORPUS),
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "snapshot": {"every_steps": 1},
        "parallel": {"strategy": strategy} | ({"shard_size": 2} if strategy == "hsdp" else {}),
        "elastic": {
            "min_workers": min(2, workers),
            "max_workers": workers,
            "gather_s": 60,
            "hang_timeout_s": 20,
            "heartbeat_timeout_s": 1.0,
            "join_batch_s": 0.1,
        },
    }
    for name, section in sections.items():
        if isinstance(section, dict) and name != "model" and "path" not in section:
            values[name] = values.get(name, {}) | section
        else:
            values[name] = section
    return parse_job(values)


# ------------------------------------------------------------------------------ a run


class StagedHost(LocalHost):
    """Replaces the lost once the others train without them, or are too few to.

    So each shrunk world is there to be seen, however fast a process starts here, and however long
    the survivors take to pause: one that has to leave a thread behind takes half a second.
    """

    has_keepers = True
    replaces_from = 0  # committed steps

    def _start_keeper(self, node: LocalNode) -> None:
        if self.has_keepers:
            super()._start_keeper(node)

    def _fill(self) -> None:
        if not self._formed:
            super()._fill()

    def refill(self, state: State) -> None:
        """Called again and again, with what the controller knows."""
        with self._lock:
            settled = state.phase == "running" and state.ranks.keys() <= self._processes.keys()
            settled = settled and state.committed >= self.replaces_from
            if settled or state.phase == "suspended":
                super()._fill()


@dataclass
class Run:
    """A finished run: its result, and its folder parsed."""

    job: Job
    path: Path
    result: dict[str, Any]
    faults: tuple[PointFault, ...] = ()
    wall_s: float = 0.0
    events: list[dict[str, Any]] = field(init=False)
    steps: list[dict[str, Any]] = field(init=False)
    ledger: list[dict[str, Any]] | None = field(init=False)

    def __post_init__(self) -> None:
        self.events = read_lines(self.path / "events.jsonl")
        self.steps = read_lines(self.path / "steps.jsonl")
        ledger = self.path / "ledger.jsonl"
        self.ledger = read_lines(ledger) if ledger.exists() else None

    def all(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]

    def after(self, line: dict[str, Any], event: str) -> list[dict[str, Any]]:
        return [other for other in self.all(event) if other["seq"] > line["seq"]]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.steps}

    def worlds(self) -> list[int]:
        return [line["world_size"] for line in self.all("generation_formed")]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return list(self.result["recoveries"])

    def story(self) -> str:
        """The journal, for people: printed when an assertion fails."""
        start = self.events[0]["at_s"] if self.events else 0.0
        lines = [
            f"{line['at_s'] - start:7.3f} g{line['generation']} {line['event']}: {line['reason']}"
            + (f"  [{line['worker']}]" if "worker" in line else "")
            for line in self.events
        ]
        return "\n".join([str(self.path), *lines])

    # -- what must hold

    def check(self, status: str = "completed", *, first_step: int = 1) -> Run:
        """Asserts the status, and I1 to I8 as far as the folder shows them. Returns self."""
        expected = Expected(
            seed=self.job.seed,
            dataset_size=dataset_size(self.job),
            global_batch_size=self.job.batch.global_batch_size,
            steps=self.job.steps,
            status=status,
            first_step=first_step,
        )
        found = check_run(self.events, self.steps, self.ledger, self.result, expected)
        assert not found, "\n".join([self.story(), *map(str, found)])
        assert not (strange := list(undeclared(self.events))), f"not in the catalogue: {strange}"
        for index in range(len(self.faults)):
            assert index in self.result["faults_fired"], (
                f"{self.story()}\nfault {index}, {self.faults[index]}, did not fire"
            )
        return self

    def same_losses_as(self, other: Run) -> None:
        """Asserts equal losses, to LOSS_TOLERANCE, at every step that both have (I3)."""
        mine, others = self.losses(), other.losses()
        common = mine.keys() & others.keys()
        assert common, "the runs have no step in common"
        for step in sorted(common):
            error = abs(mine[step] - others[step]) / abs(others[step])
            assert error <= LOSS_TOLERANCE, (
                f"{self.story()}\n"
                f"step {step}: loss {mine[step]!r}, in the other run {others[step]!r}"
            )


def dataset_size(job: Job) -> int:
    return len(open_dataset(job.data, job.seed).train)


def run_job(
    job: Job,
    out: Path,
    *,
    nodes: dict[str, int] | None = None,
    faults: Sequence[PointFault] = (),
    on_step: Callable[[Controller, dict[str, Any]], None] | None = None,
    watch: Callable[[Controller], None] | None = None,
    deadline_s: float = RUN_DEADLINE_S,
    controller: Callable[..., Controller] = Controller,
    keepers: bool = True,
    folder_url: str | None = None,
    replaces_from: int = 0,
) -> Run:
    """Runs ``job`` in folder ``out`` to its end.

    Args:
        nodes: name -> slots; by default one worker on each of ``max_workers`` nodes.
        on_step: called after each committed step, in the controller's thread.
        watch: called again and again in a thread of its own while the job runs.
        controller: what makes it.
        keepers: whether nodes have one.
        folder_url: of the run folder, if it is not ``out``; copied to there in the end.
        replaces_from: steps that must be committed before anyone lost is replaced.
    """
    nodes = nodes or {f"n{i}": 1 for i in range(job.elastic.max_workers)}
    host = StagedHost(nodes)
    folder = RunFolder(folder_url or str(out))
    url = job.checkpoint.url or f"{folder.url}/checkpoints"
    host.has_keepers, host.replaces_from = keepers, replaces_from
    running = controller(job, host, folder, url, faults=tuple(faults))
    if on_step is not None:
        running.on_step = lambda line: on_step(running, line)
    ended = threading.Event()

    def poll() -> None:
        deadline = time.monotonic() + deadline_s
        while not ended.wait(POLL_S):
            host.refill(running.state)
            if watch is not None:
                watch(running)
            if time.monotonic() > deadline:
                running.stop(f"the test's deadline of {deadline_s:g} s has passed")
                running.stop("at once")
                return

    poller = threading.Thread(target=poll, name="test-watch", daemon=True)
    poller.start()
    began = time.monotonic()
    try:
        result = running.run()
    finally:
        ended.set()
        poller.join()
    if folder_url is not None:
        out.mkdir()
        for name in ("events.jsonl", "steps.jsonl", "ledger.jsonl"):
            (out / name).write_bytes(open_store(folder_url).get(name))
    return Run(job, Path(out), result, tuple(faults), time.monotonic() - began)


def on_disk(job: Job, path: Path) -> Run:
    """The run in a folder, as another process left it."""
    return Run(job, path, json.loads((path / "result.json").read_text()))


class Gate:
    """Holds training back while the world is smaller than it may be.

    So a shrunk world commits a few steps and then waits for its replacements: the length of a
    run does not depend on how fast a process starts here.
    """

    def __init__(self, path: Path, held_open: int = STEPS_HELD_OPEN) -> None:
        self.path, self._held_open = path, held_open
        self._since: tuple[int, int] = (0, 0)  # generation, steps committed when it formed

    def job(self, strategy: str, after_step: int = 0, **sections: Any) -> Job:
        """A tiny job of four workers whose data is behind this gate, from a step on. With one the
        gate is closed by now: however late the controller hears, no step is made beyond it until
        the gate is opened."""
        free = 0
        if after_step:
            self.path.touch()
            free = 2 * after_step + 1  # samples of a step; one that is looked at beforehand
        kwargs = {"gate": str(self.path), "free": free} | CORPUS | sections.pop("corpus", {})
        data = {"path": "tests.multiproc.tiny:gated", "kwargs": kwargs}
        return make_job(strategy, data=data, **sections)

    def __call__(self, controller: Controller) -> None:
        state = controller.state
        if state.phase != "running" or state.assignment is None:
            self._open()
            return
        if self._since[0] != state.generation:
            self._since = (state.generation, state.committed)
        world, whole = len(state.assignment.members), controller.policy.max_workers
        started = state.committed >= self._since[1] + self._held_open
        if world < whole and len(state.ready) < whole and started:
            self.path.touch()
        else:
            self._open()

    def _open(self) -> None:
        self.path.unlink(missing_ok=True)


class Once:
    """Does something once a step is committed, and a checkpoint if asked; in the controller's
    thread."""

    def __init__(self, step: int, action: Any, *, checkpointed: bool = False) -> None:
        self.step, self.action, self.done = step, action, False
        self.checkpointed = checkpointed

    def __call__(self, controller: Controller, line: dict[str, Any]) -> None:
        awaited = self.checkpointed and not controller.state.checkpoints
        if line["step"] >= self.step and not self.done and not awaited:
            self.done = True
            self.action(controller, host_of(controller))


def host_of(controller: Controller) -> LocalHost:
    assert isinstance(controller.host, LocalHost)
    return controller.host
