"""What elasticity costs while nothing happens: tokens/s against the same engine's bare loop.

    python benchmarks/overhead.py --strategy fsdp --launches 5 --windows 3

Two jobs are kept side by side, each on as many worker processes, and take turns: one trains for a
few seconds while the other is stopped (SIGSTOP). So a pair of windows is seconds apart, and the
machine's drift cancels out. ``bare`` is the engine alone (forward, backward, the loss all-reduce,
clipping, optimizer); ``elastic`` is the whole runtime: controller, keepers, heartbeats, journal,
snapshots with their buddies' copies as often as the default allows. Where a process has its memory
is decided when it starts, so both are launched anew several times. Printed are the median and
min-max of the ratio over pairs of windows, and what snapshots take of host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# glibc gives large blocks back after each step and faults them in again in the next: how much of
# that a process does is chance, and up to 20 % of its time. On either side it keeps them here.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 32))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 34))

import torch
import torch.distributed as dist

from elastic_ft.config import Job, parse_job
from elastic_ft.controller.controller import Controller
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import plan_layout
from elastic_ft.core.shares import shares
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.hosts.local import LocalHost
from elastic_ft.models.build import build_model
from elastic_ft.observe.run_folder import RunFolder, read_lines

WARM_UP_STEPS = 12  # in which the cost of a snapshot is learnt, too
DEADLINE_S = 120.0


def make_job(arguments: argparse.Namespace) -> Job:
    return parse_job(
        {
            "name": "overhead",
            "steps": 1_000_000,
            "model": {"preset": arguments.preset},
            "data": {
                "url": "stdlib:",
                "vocab_size": 4096,
                "sequence_length": 256,
                "max_tokens": 500_000,
            },
            "batch": {
                "global_batch_size": arguments.batch * arguments.workers,
                "micro_batch_size": arguments.batch,
            },
            "parallel": {"strategy": arguments.strategy},
            "elastic": {
                "min_workers": arguments.workers,
                "max_workers": arguments.workers,
                "heartbeat_timeout_s": 3600,  # it is stopped half of the time
                "hang_timeout_s": 3600,
            },
            "checkpoint": {"final": False, "every_s": None},
        }
    )


def bare_worker(job: Job, rank: int, world: int, port: int, results: Any) -> None:
    """The engine's loop and nothing else. Rank 0 puts the time after each step on ``results``."""
    torch.set_num_threads(1)
    data = open_dataset(job.data, job.seed)

    def factory() -> torch.nn.Module:
        return build_model(
            job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
        )

    engine = NativeEngine(job, factory, torch.device("cpu"), data.sequence_length or 1)
    engine.prepare()
    layout, _ = plan_layout(job.parallel.wish, world)
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, ((),) * world, "bare")
    groups = Groups(dict(shares(assignment))[f"w{rank}"], members[rank], ("127.0.0.1", port))
    groups.form(torch.device("cpu"), 60)
    engine.attach(groups)
    engine.initialise()
    gc.collect()
    gc.freeze()  # as the runtime does: no advantage for it
    size = job.batch.micro_batch_size
    for number in range(1, job.steps + 1):
        first = ((number - 1) * world + rank) * size
        samples = [data.train[(first + i) % len(data.train)] for i in range(size)]
        batch = [MicroBatch(rank, data.train.collate(samples))]
        sums = engine.run_batch(number, batch, lambda *_: None)
        values = [sums.loss, float(sums.tokens), sums.squares]
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        engine.apply(number, int(packed[1]), float(packed[2]), lambda *_: None)
        if rank == 0:
            results.put(time.time())


class Bare:
    """The bare loop, on processes of its own."""

    def __init__(self, job: Job) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._results, world = context.Queue(), job.elastic.max_workers
        self._workers = [
            context.Process(
                target=bare_worker, args=(job, rank, world, self._store.port, self._results)
            )
            for rank in range(world)
        ]
        for worker in self._workers:
            worker.start()
        self._times: list[float] = []

    def times(self) -> list[float]:
        """When each step so far has ended."""
        while not self._results.empty():
            self._times.append(self._results.get())
        return self._times

    def signal(self, number: int) -> None:
        for worker in self._workers:
            os.kill(worker.pid or 0, number)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join(10)


class Elastic:
    """The job on plain processes, its controller in a thread here."""

    def __init__(self, job: Job, folder: Path) -> None:
        nodes = {f"n{i}": 1 for i in range(job.elastic.max_workers)}
        self._host, self.folder = LocalHost(nodes), folder
        run = RunFolder(str(folder))
        self._controller = Controller(job, self._host, run, f"{run.url}/checkpoints")
        self._thread = threading.Thread(target=self._controller.run)
        self._thread.start()

    def times(self) -> list[float]:
        """When each step so far was applied, as one worker tells it."""
        inbox = self.folder / "inbox.jsonl"
        told = (
            [e for e in read_lines(inbox) if e["type"] == "StepApplied"] if inbox.exists() else []
        )
        return [e["at_s"] for e in told if e["worker"] == told[0]["worker"]]

    def signal(self, number: int) -> None:
        for worker in self._host.alive():
            os.kill(self._host.pid_of(worker) or 0, number)

    def close(self) -> None:
        """Ends the run; ``host_memory`` is journalled on the way."""
        self._controller.stop("measured")
        self._thread.join(60)

    def notes(self, *events: str) -> list[str]:
        lines = read_lines(self.folder / "events.jsonl")
        return [f"{line['event']}: {line['reason']}" for line in lines if line["event"] in events]


def step_seconds(job: Bare | Elastic, window_s: float) -> float:
    """Lets ``job`` alone train for a while; the mean time of a step in it."""
    began = time.time()
    job.signal(signal.SIGCONT)
    time.sleep(window_s)
    job.signal(signal.SIGSTOP)
    ended = [t for t in job.times() if t >= began][1:]  # the first was under way before
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def warm_up(job: Bare | Elastic) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(job.times()) < WARM_UP_STEPS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{type(job).__name__} did not get going in {DEADLINE_S:g} s")
        time.sleep(0.2)
    job.signal(signal.SIGSTOP)


def measure(job: Job, arguments: argparse.Namespace, launch: int) -> list[dict[str, float]]:
    """One line per pair of windows, of one launch of both."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bare = Bare(job)
        stack.callback(bare.close)
        warm_up(bare)
        elastic = Elastic(job, Path(folder))
        stack.callback(elastic.close)
        warm_up(elastic)
        for number in range(arguments.windows):
            both = [("bare", bare), ("elastic", elastic)]
            turns = both if number % 2 else both[::-1]
            pair = {name: step_seconds(which, arguments.seconds) for name, which in turns}
            pairs.append({"launch": launch, **pair, "ratio": pair["bare"] / pair["elastic"]})
            print(" ".join(f"{name} {value:.4g}" for name, value in pairs[-1].items()), flush=True)
        elastic.signal(signal.SIGCONT)
        elastic.close()
        for note in elastic.notes("snapshot_interval", "host_memory"):
            print(note)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fsdp", choices=["ddp", "fsdp"])
    parser.add_argument("--preset", default="decoder-1m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples per worker and step")
    parser.add_argument("--launches", type=int, default=5, help="of both jobs")
    parser.add_argument("--windows", type=int, default=3, help="pairs of them in a launch")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one window")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    job = make_job(arguments)
    pairs = [pair for n in range(arguments.launches) for pair in measure(job, arguments, n)]
    tokens = job.batch.global_batch_size * job.data.sequence_length
    ratios = [pair["ratio"] for pair in pairs]
    print(
        f"{arguments.strategy}: elastic/bare tokens/s, median {statistics.median(ratios):.4f} "
        f"(min {min(ratios):.4f}, max {max(ratios):.4f}) over {len(ratios)} pairs of windows; bare "
        f"{tokens / statistics.median(pair['bare'] for pair in pairs):.0f} tokens/s"
    )
    out = Path(arguments.out) / f"overhead-{arguments.strategy}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": vars(arguments), "pairs": pairs}, indent=1))


if __name__ == "__main__":
    main()
