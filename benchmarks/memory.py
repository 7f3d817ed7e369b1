"""Predicted against measured peak memory of the native engine, on CPU processes.

    python benchmarks/memory.py --newer --out benchmarks/results/memory_newer.json
    python benchmarks/memory.py --held-out --out benchmarks/results/memory_held_out.json

For each layout, ranks train three steps of two micro-batches each. Measured are the bytes of
tensors: torch's profiler notes what its allocator hands out and gets back, collectives' copies
included, from before the engine makes anything; the highest sum is the peak. The prediction is
``core.layouts.memory_costs`` with the unfused kernels that CPUs have.

``--malloc`` measures what malloc has handed out instead (glibc's ``mallinfo2``, read after each
operator of the last step, less what there was before): Python's objects, libraries' buffers and the
code that the first step imports, too.

Whoever drops a tensor last gives it back, and the profiler hears nothing of Gloo's own threads:
what they drop late would count as there for good. So after each wait these have a moment to do so
first, and the least of two tries counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.planner import CHUNKS
from elastic_ft.core.layouts.work import Choice
from elastic_ft.core.shares import shares
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.engines.pipeline import micro_batches_to_run
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job

VOCABULARY, MICRO_BATCHES, STEPS = 4096, 2, 3
DEADLINE_S = 1800.0
MEET_S = 120.0  # a loaded machine starts processes one after the other
DROPPING_S = 0.002  # that Gloo's threads have to let go of what a collective was given
Sections = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """``sections``: what the job file says besides."""

    layout: Layout
    sections: Sections = dataclasses.field(default_factory=dict)
    micro_batch: int = 1
    micro_batches: int = MICRO_BATCHES
    preset: str = "decoder-4m"


def parallel(**said: Any) -> Sections:
    return {"parallel": said}


TWO_HEADS: Sections = {"model": {"kwargs": {"n_kv_heads": 2}}}
NEWER: list[tuple[Layout, Sections]] = [
    (Layout(tp=2), {}),
    (Layout(dp_shard=2, tp=2), {}),
    (Layout(pp=2), {}),
    (Layout(pp=2), parallel(schedule="gpipe")),
    (Layout(pp=2, dp_shard=2), {}),
    (Layout(cp=2), {}),
    (Layout(dp_shard=2, cp=2), {}),
    (Layout(dp_shard=2), parallel(activation_checkpointing="selective")),
    (Layout(dp_shard=2), parallel(loss_chunk_tokens=64)),
    (Layout(dp_shard=2), parallel(reshard_after_backward=False)),
    (Layout(dp_shard=2), parallel(reduce_gradients="step")),
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
BF16: Sections = {"precision": {"dtype": "bf16"}}
FOUR_HEADS: Sections = {"model": {"kwargs": {"n_kv_heads": 4}}}
TIED: Sections = {"model": {"kwargs": {"tie_embeddings": True}}}
# Chosen after the formulas stood, and not looked at before.
HELD_OUT = [
    Case(
        Layout(dp_replicate=2, dp_shard=2), parallel(activation_checkpointing="selective") | BF16, 2
    ),
    Case(Layout(dp_replicate=2), BF16, 2, preset="decoder-15m"),
    Case(Layout(pp=2, tp=2), {}, 2, 4, "decoder-15m"),
    Case(Layout(pp=4), {}, 2, 6),
    Case(Layout(pp=2, dp_shard=2), parallel(schedule="gpipe", activation_checkpointing=True), 2, 3),
    Case(Layout(tp=2), parallel(activation_checkpointing=True) | FOUR_HEADS, 4, 3, "decoder-15m"),
    Case(Layout(dp_shard=2, tp=2), parallel(loss_chunk_tokens=96) | BF16, 1, 2, "decoder-15m"),
    Case(Layout(cp=4), parallel(activation_checkpointing="selective"), 4),
    Case(Layout(dp_shard=4), parallel(reduce_gradients="step", reshard_after_backward=False), 1, 3),
    Case(Layout(dp_shard=3), TIED, 2, 1, "decoder-15m"),
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


def make_job(case: Case) -> Job:
    layout, sections = case.layout, case.sections
    size = case.micro_batch * case.micro_batches * layout.data_parallel_size
    strategy = "fsdp" if layout.dp_replicate == 1 else "hsdp" if layout.dp_shard > 1 else "ddp"
    job: Sections = {
        "model": {"preset": case.preset} | sections.get("model", {}),
        "data": {"url": "stdlib:", "vocab_size": VOCABULARY},
        "batch": {"global_batch_size": size, "micro_batch_size": case.micro_batch},
        "parallel": {"strategy": strategy} | sections.get("parallel", {}),
    }
    return parse_job({"name": "memory", "steps": STEPS, **sections, **job})


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    if arguments.held_out:
        yield from HELD_OUT
        return
    for size in arguments.micro_batch:
        for layout, dtype, recompute in [] if arguments.newer else CASES:
            said = parallel(activation_checkpointing=recompute) | {"precision": {"dtype": dtype}}
            yield Case(layout, said, size, preset=arguments.preset)
        for layout, sections in NEWER if arguments.newer else []:
            yield Case(layout, sections | TWO_HEADS, size, preset=arguments.preset)


def choice_of(job: Job, layout: Layout) -> Choice:
    said, chunks = job.parallel, CHUNKS.get(job.parallel.schedule, 1) if layout.has_stages else 1
    again = said.activation_checkpointing
    return Choice(layout, job.batch.micro_batch_size, again, said.schedule, chunks)


def peak_of_tensors(work: Callable[[], None]) -> int:
    """Bytes at the peak of what the allocator hands out in ``work`` and gets back, by any thread.
    Nothing that is released in it may be older."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    changes: list[tuple[int, int, int]] = []  # when, bytes, where
    _collect(profiled.profiler.kineto_results.experimental_event_tree(), None, changes)
    live: dict[int, int] = {}
    now = peak = 0
    for _, nbytes, where in sorted(changes, key=lambda change: change[0]):  # of several threads
        now -= live.pop(where, 0)
        if nbytes > 0:
            live[where] = nbytes
            now += nbytes
            peak = max(peak, now)
    return peak


@contextlib.contextmanager
def dropped_by_gloo() -> Iterator[None]:
    """Each wait for a collective lasts until Gloo's threads no longer hold its tensors, most
    likely: only what this thread releases is heard of."""
    work, wait = dist.Work, dist.Work.wait

    def patient(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(self, *args, **kwargs)
        time.sleep(DROPPING_S)
        return result

    work.wait = patient  # type: ignore[method-assign]
    try:
        yield
    finally:
        work.wait = wait  # type: ignore[method-assign]


def _collect(events: Any, within: Any, changes: list[tuple[int, int, int]]) -> None:
    """``within``: the collective that ``events`` are part of. What it makes is its own, and it may
    be Gloo's thread that releases it, of which the profiler does not hear."""
    for event in events:
        if event.name == "[memory]":
            of = event.extra_fields
            changes.append((event.start_time_ns, of.alloc_size, of.ptr))
            if within is not None and of.alloc_size > 0:
                changes.append((within.end_time_ns, 0, of.ptr))
        is_collective = event.name.startswith("c10d::")
        _collect(event.children, event if is_collective else within, changes)


def trainer_of(groups: Groups, job: Job, micro_batches: int) -> Callable[[int], None]:
    """What trains the step of the job whose number it is given; 0: makes all that is trained."""
    length, device, vocabulary = job.data.sequence_length, torch.device("cpu"), job.data.vocab_size
    engine = NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=vocabulary, sequence_length=length),
        device,
        length,
    )
    engine.prepare()
    size = job.batch.micro_batch_size
    layout = groups.assignment.layout
    if layout.has_stages:
        micro_batches = micro_batches_to_run(micro_batches, layout.pp, job.parallel.schedule)
    batches = [
        MicroBatch(n, {"tokens": torch.randint(0, vocabulary, (size, length + 1))})
        for n in range(micro_batches)
    ]
    tokens = job.batch.global_batch_size * length

    def train(step: int) -> None:
        if step == 0:
            engine.attach(groups)
            engine.initialise()
            return
        sums = engine.run_batch(step, batches, lambda *point: None)
        squares = torch.tensor(sums.squares, dtype=torch.float64)
        dist.all_reduce(squares)
        engine.apply(step, tokens, float(squares), lambda *point: None)

    return train


def peak_of_rank(groups: Groups, job: Job, micro_batches: int, by_malloc: bool = False) -> int:
    """Bytes above what there was before the engine."""
    step, peak = trainer_of(groups, job, micro_batches), Peak()

    def train() -> None:
        step(0)
        for number in range(1, STEPS + 1):
            gc.collect()
            with peak if by_malloc else contextlib.nullcontext():
                step(number)

    gc.collect()
    before = allocated()
    if not by_malloc:
        with dropped_by_gloo():
            return peak_of_tensors(train)
    train()
    return peak.nbytes - before


Found = TypeVar("Found")
Take = Callable[[Groups, Job, int], Found]


def _rank(
    rank: int,
    job: Job,
    layout: Layout,
    micro_batches: int,
    port: int,
    results: Any,
    take: Take[Any],
) -> None:
    torch.set_num_threads(1)
    world = layout.world_size
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    buddies = tuple(((r + 1) % world,) if world > 1 else () for r in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, buddies, "benchmark")
    share, store = dict(shares(assignment))[f"w{rank}"], ("127.0.0.1", port)
    groups = Groups(share, members[rank], store, meet_timeout_s=MEET_S)
    try:
        groups.form(torch.device("cpu"), DEADLINE_S)
        results.put((rank, take(groups, job, micro_batches), ""))
        groups.barrier("end")
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def of_ranks(job: Job, layout: Layout, micro_batches: int, take: Take[Found]) -> list[Found]:
    """What ``take`` returns on each of the layout's ranks, a process each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=_rank, args=(rank, job, layout, micro_batches, store.port, results, take)
        )
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
    return [taken for _, taken, _ in found]


def measure(
    job: Job, layout: Layout, micro_batches: int = MICRO_BATCHES, by_malloc: bool = False
) -> int:
    """Bytes of the fullest rank. Of several ranks the least of two tries: what Gloo was slow to
    drop only adds."""
    tries = 2 if layout.world_size > 1 and not by_malloc else 1
    take = partial(peak_of_rank, by_malloc=by_malloc)
    return min(max(of_ranks(job, layout, micro_batches, take)) for _ in range(tries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="decoder-4m")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1])
    parser.add_argument("--newer", action="store_true", help="the other layouts")
    parser.add_argument("--held-out", action="store_true", help="ten that no formula was made for")
    parser.add_argument("--malloc", action="store_true", help="measure all that malloc hands out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for case in cases(arguments):
        job = make_job(case)
        predicted = memory(describe_job(job), choice_of(job, case.layout), fused=False).total
        measured = measure(job, case.layout, case.micro_batches, arguments.malloc)
        line: dict[str, Any] = dataclasses.asdict(case) | {"layout": str(case.layout)}
        line |= {"measured_by": "malloc" if arguments.malloc else "tensors"}
        line |= {"predicted_bytes": round(predicted), "measured_bytes": measured}
        lines.append(line | {"ratio": round(predicted / measured, 4)})
        print(
            f"{case.layout!s:10} {case.preset}, {case.sections}, {case.micro_batches} x "
            f"{case.micro_batch}: predicted {predicted / 1e6:.1f} MB, measured "
            f"{measured / 1e6:.1f} MB, {predicted / measured - 1:+.1%}",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
