"""What elasticity costs while nothing happens: tokens/s against the same engine's bare loop.

    python benchmarks/overhead.py --strategy fsdp --rounds 5

Each round runs the two in turn, on as many worker processes, with the same job: ``bare`` is the
engine alone (forward, backward, the loss all-reduce, clipping, optimizer); ``elastic`` is the whole
runtime: controller, keepers, heartbeats, journal, snapshots with their buddies' copies as often as
the default allows. The figure is the ratio of the means of a round (a snapshot's step is longer
than the others); the median and min-max over rounds are printed,
with the host memory that snapshots take per byte of state. Raw numbers go to ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from elastic_ft.config import Job, parse_job
from elastic_ft.core.events import Assignment, Member, Source, Tier
from elastic_ft.core.layout import plan_layout
from elastic_ft.models.build import build_model
from elastic_ft.observe.run_folder import read_lines
from elastic_ft.runtime.data import open_dataset
from elastic_ft.runtime.engines.base import MicroBatch
from elastic_ft.runtime.engines.native import NativeEngine
from elastic_ft.runtime.groups import Groups
from elastic_ft.runtime.local import run_local

WARM_UP_STEPS = 12  # in which the cost of a snapshot is learnt, too


def make_job(arguments: argparse.Namespace) -> Job:
    return parse_job(
        {
            "name": "overhead",
            "steps": arguments.steps + WARM_UP_STEPS,
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
            "elastic": {"min_workers": arguments.workers, "max_workers": arguments.workers},
            "checkpoint": {"final": False},
        }
    )


def bare_worker(job: Job, rank: int, world: int, port: int, results: Any) -> None:
    """The engine's loop and nothing else. Puts this rank's step times on ``results``."""
    torch.set_num_threads(1)
    data = open_dataset(job.data, job.seed)

    def factory() -> torch.nn.Module:
        return build_model(
            job.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length
        )

    engine = NativeEngine(job, factory, torch.device("cpu"), data.sequence_length or 1)
    engine.prepare()
    layout, _ = plan_layout(job.parallel.strategy, world, None)
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, ((),) * world, "bare")
    groups = Groups(assignment, f"w{rank}", ("127.0.0.1", port))
    groups.form(torch.device("cpu"), 60)
    engine.attach(groups)
    engine.initialise()
    times = []
    size = job.batch.micro_batch_size
    for number in range(1, job.steps + 1):
        began = time.perf_counter()
        first = ((number - 1) * world + rank) * size
        samples = [data.train[(first + i) % len(data.train)] for i in range(size)]
        batch = [MicroBatch(rank, data.train.collate(samples))]
        loss, tokens = engine.run_batch(number, batch, lambda *_: None)
        packed = torch.tensor([loss, float(tokens)], dtype=torch.float64)
        dist.all_reduce(packed)
        engine.apply(number, int(packed[1]), lambda *_: None)
        times.append(time.perf_counter() - began)
    results.put(times if rank == 0 else None)
    groups.barrier("end")


def run_bare(job: Job) -> list[float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    world = job.elastic.max_workers
    workers = [
        context.Process(target=bare_worker, args=(job, rank, world, store.port, results))
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join(60)
    return next(times for times in found if times)[WARM_UP_STEPS:]


def run_elastic(job: Job) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        result = run_local(job, folder)
        assert result["status"] == "completed", result["reason"]
        told = [e for e in read_lines(Path(folder) / "inbox.jsonl") if e["type"] == "StepApplied"]
        applied = [e["at_s"] for e in told if e["worker"] == told[0]["worker"]]
        show_interval(Path(folder))
    return [b - a for a, b in itertools.pairwise(applied)][WARM_UP_STEPS - 1 :]


def show_interval(folder: Path) -> None:
    for event in read_lines(folder / "events.jsonl"):
        if event["event"] == "snapshot_interval":
            print(f"  step snapshots: {event['reason']}")


def host_memory(job: Job) -> str:
    """Bytes of snapshot buffers per byte of a rank's own state, by construction."""
    if job.parallel.strategy == "ddp":
        return "0 (replicated state needs no snapshot)"
    return "4.0x of the rank's own shard: two own buffers and two of its buddy's, double-buffered"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="fsdp", choices=["ddp", "fsdp"])
    parser.add_argument("--preset", default="decoder-1m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples per worker and step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/overhead.json")
    arguments = parser.parse_args()
    job = make_job(arguments)
    tokens = job.batch.global_batch_size * job.data.sequence_length
    rounds = []
    for number in range(arguments.rounds):
        order = [("bare", run_bare), ("elastic", run_elastic)]
        times = {name: run(job) for name, run in (order if number % 2 else order[::-1])}
        rates = {name: tokens / statistics.mean(values) for name, values in times.items()}
        ratio = rates["elastic"] / rates["bare"]
        rounds.append({"step_seconds": times, "tokens_per_s": rates, "ratio": ratio})
        print(
            f"round {number + 1}: bare {rates['bare']:.0f} tokens/s, elastic "
            f"{rates['elastic']:.0f} tokens/s, ratio {ratio:.4f}",
            flush=True,
        )
    ratios = [r["ratio"] for r in rounds]
    print(
        f"{arguments.strategy}: elastic/bare tokens/s, median {statistics.median(ratios):.4f} "
        f"(min {min(ratios):.4f}, max {max(ratios):.4f}) over {len(ratios)} rounds"
    )
    print(f"host memory of snapshots: {host_memory(job)}")
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": vars(arguments), "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
