"""What a checkpoint takes from training, against torch.distributed.checkpoint on the same state.

Two FSDP2 ranks train the same model in one loop; now and then a checkpoint is begun, in turn by
``ours`` (copied to host memory while the next step runs, written by the node's keeper),
``async_save`` and ``save`` (both into a new folder, as they must). Counted is the time of the
training thread, on the slower rank: what it waits for (``blocked``: in the call that begins, and
for the copy to end before the next optimizer step; ``cpu``: the processor's time in that); and by
how much all steps from the one that begins until it is written everywhere are longer than the
median quiet step (``all``: with what the writing takes of this machine's processors).
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Keeper
from elastic_ft.core.events import KeeperReady, ShardsFailed
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.keeper.node_keeper import NodeKeeper
from elastic_ft.models.build import build_model
from elastic_ft.state.checkpointer import Checkpointer, StorePatience, owned_by
from elastic_ft.state.placed import exchange_placed
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.transport.control import ControlServer, Welcome
from elastic_ft.transport.tls import JobKey

WORLD = 2
WAYS = ("ours", "async_save", "save")
QUIET_STEPS = 4  # between two checkpoints
KEEPER_DEADLINE_S = 60.0


def make_job(preset: str) -> Job:
    return parse_job(
        {
            "name": "stall",
            "steps": 1_000_000,
            "model": {"preset": preset},
            "data": {
                "url": "stdlib:",
                "vocab_size": 4096,
                "sequence_length": 64,
                "max_tokens": 200_000,
            },
            "batch": {"global_batch_size": WORLD, "micro_batch_size": 1},
            "parallel": {"strategy": "fsdp"},
            "elastic": {"min_workers": WORLD, "max_workers": WORLD},
        }
    )


def keep(controller: tuple[str, int], key: JobKey, node: str, host: str) -> None:
    """A process of its own. Blocks until the controller is gone."""
    NodeKeeper(controller, key, node, host).serve()


@contextmanager
def keepers(count: int) -> Iterator[tuple[list[Keeper], JobKey]]:
    """Node keepers, a process each, and the key to talk to them."""
    said: queue.Queue[Any] = queue.Queue()
    server = ControlServer(
        "127.0.0.1",
        lambda member: Welcome(make_job("decoder-1m"), "", "", ("", 0)),
        lambda member, message: said.put(message),
        lambda member, silent_s: None,
    )
    server.start()
    context, address = multiprocessing.get_context("spawn"), ("127.0.0.1", server.port)
    processes = [
        context.Process(target=keep, args=(address, server.key, f"n{i}", "127.0.0.1"))
        for i in range(count)
    ]
    for process in processes:
        process.start()
    found: list[Keeper] = []
    try:
        while len(found) < count:
            message = said.get(timeout=KEEPER_DEADLINE_S)
            if isinstance(message, KeeperReady):
                found.append(message.keeper)
        yield sorted(found, key=lambda keeper: keeper.node), server.key
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        server.close()


class Rank:
    """One rank's loop, and the three ways to write a checkpoint of it."""

    def __init__(
        self, groups: Groups, engine: NativeEngine, data: Any, folder: Path, keeper: KeeperClient
    ) -> None:
        self.groups, self.engine, self.data, self.folder = groups, engine, data, folder
        self.step, self.blocked_s, self.cpu_s = 0, 0.0, 0.0
        self.reports: queue.Queue[Any] = queue.Queue()
        self.snapshots = Snapshots(groups.worker, False, print)
        self.snapshots.use(keeper)
        self._checkpointer = Checkpointer(
            groups.worker,
            "run",
            str(folder / "ours"),
            self.snapshots,
            self.reports.put,
            lambda *_: None,
        )
        self._dcp_group = dist.new_group(backend="gloo")  # its thread must not use training's
        self._owned = owned_by(groups, exchange_placed(groups, [], engine.state()))

    def train(self, begin: Callable[[], object] | None, written: bool) -> tuple[float, bool]:
        """One step, then ``begin``. Returns its seconds, and whether all ranks have written."""
        began, self.step = time.perf_counter(), self.step + 1
        index = (self.step * WORLD + (self.groups.rank or 0)) % len(self.data)
        batch = [MicroBatch(self.groups.rank or 0, self.data.collate([self.data[index]]))]
        sums = self.engine.run_batch(self.step, batch, lambda *_: None)
        self._blocked(lambda: self.snapshots.wait(self.groups.deadline()))
        values = [sums.loss, float(sums.tokens), float(written), sums.squares]
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        self.engine.apply(self.step, int(packed[1]), float(packed[3]), lambda *_: None)
        if begin is not None:
            self._blocked(begin)
        return time.perf_counter() - began, int(packed[2]) == WORLD

    def _blocked(self, work: Callable[[], object]) -> None:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        work()
        self.blocked_s += time.perf_counter() - began_s
        self.cpu_s += time.thread_time() - cpu_s

    def ours(self) -> Callable[[], bool]:
        state = self.engine.state()
        mine = self._checkpointer.owned_state(state, self._owned)
        shard = self.snapshots.take(self.step, mine, self.groups, {}, lambda *_: None, partial=True)
        once = StorePatience(0.0, lambda: False)
        self._checkpointer.write(shard, self._owned, state, self.groups, once)

        def ended() -> bool:
            try:
                report = self.reports.get_nowait()
            except queue.Empty:
                return False
            assert not isinstance(report, ShardsFailed), report.reason
            return True

        return ended

    def async_save(self) -> Callable[[], bool]:
        future: Any = dcp.async_save(
            self._for_dcp(),
            checkpoint_id=self._folder("async"),
            process_group=self._dcp_group,
        )
        future = future if isinstance(future, Future) else future.upload_completion

        def ended() -> bool:
            if future.done():
                future.result()  # raises what went wrong
            return bool(future.done())

        return ended

    def save(self) -> Callable[[], bool]:
        dcp.save(self._for_dcp(), checkpoint_id=self._folder("save"))
        return lambda: True

    def _folder(self, way: str) -> str:
        return str(self.folder / f"{way}{self.step}")

    def _for_dcp(self) -> dict[str, Any]:
        """The tensors that ``engine.state`` lists, as DTensors, by the same names."""
        optimizer = self.engine._model.optimizer
        state: dict[str, Any] = {}
        for name, parameter in self.engine._model.parameters.items():
            state[f"model.{name}"] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                state[f"optim.{name}.{key}"] = value
        return state

    def checkpoint(self, way: str) -> dict[str, float]:
        """Seconds that the training thread lost, and those of a quiet step."""
        quiet = [self.train(None, False)[0] for _ in range(QUIET_STEPS)]
        ended: list[Callable[[], bool]] = []
        self.blocked_s = self.cpu_s = 0.0
        times = [self.train(lambda: ended.append(getattr(self, way)()), False)[0]]
        mine, everyone = False, False
        while not everyone:
            mine = mine or ended[0]()
            took, everyone = self.train(None, mine)
            times.append(took)
        blocked_s, cpu_s = self.blocked_s, self.cpu_s
        quiet += [self.train(None, False)[0] for _ in range(QUIET_STEPS)]
        step_s = statistics.median(quiet)
        above_s = sum(times) - step_s * len(times)
        lost = {"blocked_s": blocked_s, "cpu_s": cpu_s, "all_s": above_s}
        return lost | {"steps": len(times), "step_s": step_s}


def one_rank(
    groups: Groups, preset: str, rounds: int, folder: str, kept: list[Keeper], key: JobKey
) -> dict[str, Any]:
    job = make_job(preset)
    data = open_dataset(job.data, job.seed)

    def factory() -> torch.nn.Module:
        return build_model(
            job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
        )

    engine = NativeEngine(job, factory, torch.device("cpu"), data.sequence_length or 1)
    engine.prepare()
    engine.attach(groups)
    engine.initialise()
    keeper = KeeperClient(kept[groups.participant], key, groups.worker)
    rank = Rank(groups, engine, data.train, Path(folder), keeper)
    own = sum(t.local.numel() * t.local.element_size() for t in engine.state().values())
    results = []
    for number in range(rounds + 1):  # the first warms up all
        ways = WAYS[number % 3 :] + WAYS[: number % 3]
        results.append({way: rank.checkpoint(way) for way in ways})
    rank.snapshots.close()
    return {"rounds": results[1:], "state_bytes": own}


def measure(preset: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Per round and way, the seconds that the slower rank lost; and the ratios."""
    with keepers(WORLD) as (kept, key):
        found = on_ranks(WORLD, one_rank, preset, rounds, str(folder), kept, key)
    lines = []
    for number in range(rounds):
        line: dict[str, Any] = {"state_bytes": [each["state_bytes"] for each in found]}
        for way in WAYS:
            both = [each["rounds"][number][way] for each in found]
            line[way] = {k: max(b[k] for b in both) for k in both[0]}
        lines.append(line)
    return lines
