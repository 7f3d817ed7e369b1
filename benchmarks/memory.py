"""Predicted against measured peak memory of the native engine, on CPU processes.

    python benchmarks/memory.py --micro-batch 4 --out benchmarks/results/memory.json
    python benchmarks/memory.py --newer --out benchmarks/results/memory_newer.json

For each layout, ranks train three steps of two micro-batches each. What malloc has handed out
(glibc's ``mallinfo2``, every arena) is read after each operator of the last step; its highest, less
what there was before the engine made anything, is the peak. The prediction is ``core.costs`` with
the unfused kernels that CPUs have.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.work import Choice
from elastic_ft.core.shares import share_of
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job

VOCABULARY, MICRO_BATCHES, STEPS = 4096, 2, 3
DEADLINE_S = 600.0
NEWER: list[tuple[Layout, dict[str, dict[str, Any]]]] = [  # and what the job file says
    (Layout(tp=2), {}),
    (Layout(dp_shard=2, tp=2), {}),
    (Layout(pp=2), {}),
    (Layout(pp=2), {"parallel": {"schedule": "gpipe"}}),
    (Layout(pp=2, dp_shard=2), {}),
    (Layout(cp=2), {}),
    (Layout(dp_shard=2, cp=2), {}),
    (Layout(dp_shard=2), {"parallel": {"activation_checkpointing": "selective"}}),
    (Layout(dp_shard=2), {"parallel": {"loss_chunk_tokens": 64}}),
    (Layout(dp_shard=2), {"parallel": {"reshard_after_backward": False}}),
    (Layout(dp_shard=2), {"parallel": {"reduce_gradients": "step"}}),
    (Layout(dp_shard=3), {}),
    (Layout(dp_shard=4), {"precision": {"dtype": "bf16"}}),
    (Layout(dp_shard=2), {"comm": {"compress_shards": "int8"}}),
    (Layout(dp_replicate=2), {"comm": {"compress_replicas": "int8"}}),
    (Layout(dp_replicate=2), {"comm": {"compress_replicas": "powersgd"}}),
]
CASES = [  # layout, dtype, recomputation
    (Layout(), "fp32", False),
    (Layout(dp_replicate=2), "fp32", False),
    (Layout(dp_shard=2), "fp32", False),
    (Layout(dp_shard=4), "fp32", False),
    (Layout(dp_replicate=2, dp_shard=2), "fp32", False),
    (Layout(dp_replicate=2), "fp32", True),
    (Layout(dp_shard=2), "fp32", True),
    (Layout(dp_shard=2), "bf16", False),
]


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def allocated() -> int:
    """Bytes that malloc has handed out to this process and not got back."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Peak(TorchDispatchMode):
    """The highest ``allocated`` after any operator run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, allocated())
        return result


def make_job(
    preset: str, layout: Layout, micro_batch: int, sections: dict[str, dict[str, Any]]
) -> Job:
    size = micro_batch * MICRO_BATCHES * layout.data_parallel_size
    strategy = "fsdp" if layout.dp_replicate == 1 else "hsdp" if layout.dp_shard > 1 else "ddp"
    job: dict[str, dict[str, Any]] = {
        "model": {"preset": preset} | sections.get("model", {}),
        "data": {"url": "stdlib:", "vocab_size": VOCABULARY},
        "batch": {"global_batch_size": size, "micro_batch_size": micro_batch},
        "parallel": {"strategy": strategy} | sections.get("parallel", {}),
    }
    return parse_job({"name": "memory", "steps": STEPS, **sections, **job})


def cases(arguments: argparse.Namespace) -> Iterator[tuple[Layout, int, dict[str, dict[str, Any]]]]:
    """Layout, micro-batch size, sections of the job file."""
    for micro_batch in arguments.micro_batch:
        for layout, dtype, recompute in [] if arguments.newer else CASES:
            parallel = {"activation_checkpointing": recompute}
            yield layout, micro_batch, {"precision": {"dtype": dtype}, "parallel": parallel}
        for layout, sections in NEWER if arguments.newer else []:
            yield layout, micro_batch, sections | {"model": {"kwargs": {"n_kv_heads": 2}}}


def peak_of_rank(groups: Groups, job: Job) -> int:
    """Bytes above what there was before the engine."""
    length, device, vocabulary = job.data.sequence_length, torch.device("cpu"), job.data.vocab_size
    engine = NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=vocabulary, sequence_length=length),
        device,
        length,
    )
    engine.prepare()
    size = job.batch.micro_batch_size
    batches = [
        MicroBatch(n, {"tokens": torch.randint(0, vocabulary, (size, length + 1))})
        for n in range(MICRO_BATCHES)
    ]
    tokens = job.batch.global_batch_size * length
    gc.collect()
    before = allocated()
    engine.attach(groups)
    engine.initialise()
    peak = Peak()
    for step in range(1, STEPS + 1):
        gc.collect()
        with peak:
            engine.run_batch(step, batches, lambda *point: None)
            squares = torch.tensor(engine.square_norm(), dtype=torch.float64)
            dist.all_reduce(squares)
            engine.apply(step, tokens, float(squares), lambda *point: None)
    return peak.nbytes - before


def _rank(rank: int, layout: Layout, port: int, results: Any, job: Job) -> None:
    torch.set_num_threads(1)
    world = layout.world_size
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    buddies = tuple(((r + 1) % world,) if world > 1 else () for r in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, buddies, "benchmark")
    groups = Groups(share_of(assignment, f"w{rank}"), members[rank], ("127.0.0.1", port))
    try:
        groups.form(torch.device("cpu"), DEADLINE_S)
        results.put((rank, peak_of_rank(groups, job), ""))
        groups.barrier("end")
    except BaseException:
        results.put((rank, 0, traceback.format_exc()))
        raise


def measure(job: Job, layout: Layout) -> int:
    """Bytes of the fullest rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, layout, store.port, results, job))
        for rank in range(layout.world_size)
    ]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=DEADLINE_S) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    if failed := [error for _, _, error in found if error]:
        raise RuntimeError(failed[0])
    return max(nbytes for _, nbytes, _ in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="decoder-4m")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1])
    parser.add_argument("--newer", action="store_true", help="the other layouts")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for layout, micro_batch, sections in cases(arguments):
        job = make_job(arguments.preset, layout, micro_batch, sections)
        parallel = job.parallel
        choice = Choice(layout, micro_batch, parallel.activation_checkpointing, parallel.schedule)
        predicted = memory(describe_job(job), choice, fused=False).total
        measured = measure(job, layout)
        line: dict[str, Any] = {"layout": str(layout), "dtype": job.precision.dtype}
        line |= {"recompute": parallel.activation_checkpointing, "job": sections}
        line |= {"micro_batch": micro_batch, "preset": arguments.preset}
        line |= {"predicted_bytes": round(predicted), "measured_bytes": measured}
        lines.append(line | {"ratio": round(predicted / measured, 4)})
        print(
            f"{layout!s:8} {sections}, micro-batch {micro_batch}: predicted "
            f"{predicted / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB, "
            f"{predicted / measured - 1:+.1%}",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
