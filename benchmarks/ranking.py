"""Of two layouts, which is faster: as the planner says, and as it is measured here.

    python benchmarks/ranking.py --out benchmarks/results/ranking.json

All choices for one number of ranks are measured in turns, round by round, in the same processes,
which form anew for each: what slows the machine meets all alike. A pair's ratio is the median over
rounds of the ratio of the medians of a round's steps. The planner is calibrated as a running job
would: by the steps of DDP, which give the rate of devices, and by the time that Gloo takes to sum
a little and a lot. What it takes to launch a layer is the difference between DDP's steps of a few
and of many layers with next to nothing to compute. No other choice's time goes into what is
predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from elastic_ft.config import Job, parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.calibration import STEPS_MIN, calibrate
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.planner import Limits
from elastic_ft.core.layouts.time_costs import Interconnect, step_time
from elastic_ft.core.layouts.work import Choice, Devices
from elastic_ft.core.shares import shares
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.engines.pipeline import micro_batches_to_run
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job

VOCABULARY, LENGTH, GLOBAL_BATCH, WARM_UP = 4096, 128, 8, 1
PRESET = "decoder-4m"
KWARGS = {"n_kv_heads": 2}
DEADLINE_S, OPERATION_S = 1800.0, 120.0
LITTLE, LOT, TIMES = 8, 1 << 20, 10  # numbers summed, and how often
FEW, MANY = 2, 10  # layers that are next to nothing
TINY, TINY_LENGTH = {"dim": 24, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64}, 8
DDP, FSDP, TP, PP = Layout(2), Layout(1, 2), Layout(tp=2), Layout(pp=2)
DDP4, FSDP4, HSDP = Layout(4), Layout(1, 4), Layout(2, 2)
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Run:
    layout: Layout
    micro_batch: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        return f"{self.layout} of {self.micro_batch}" + ", recomputing" * self.recompute


# Fixed before any of them was measured.
PAIRS = [
    (Run(DDP), Run(FSDP)),
    (Run(DDP), Run(TP)),
    (Run(FSDP), Run(TP)),
    (Run(FSDP), Run(PP)),
    (Run(TP), Run(PP)),
    (Run(FSDP), Run(FSDP, recompute=True)),
    (Run(FSDP), Run(FSDP, 4)),
    (Run(PP), Run(PP, 4)),
    (Run(DDP4), Run(FSDP4)),
    (Run(HSDP), Run(FSDP4)),
]
CALIBRATING = {layout.world_size: Run(layout) for layout in (DDP, DDP4)}


def job_of(run: Run, model: dict[str, int] = KWARGS, length: int = LENGTH) -> Job:
    layout = run.layout
    strategy = "fsdp" if layout.dp_replicate == 1 else "hsdp" if layout.dp_shard > 1 else "ddp"
    batch = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": run.micro_batch}
    values: dict[str, Any] = {
        "name": "ranking",
        "steps": 1000,
        "model": {"preset": PRESET, "kwargs": model},
        "data": {"url": "stdlib:", "vocab_size": VOCABULARY, "sequence_length": length},
        "batch": batch,
        "parallel": {"strategy": strategy, "activation_checkpointing": run.recompute},
    }
    return parse_job(values)


def runs_of(world: int) -> list[Run]:
    of_pairs = [run for pair in PAIRS for run in pair if run.layout.world_size == world]
    return list(dict.fromkeys([CALIBRATING[world], *of_pairs]))


# ------------------------------------------------------------------------------ on the ranks


def steps_s(groups: Groups, run: Run, steps: int, job: Job) -> list[float]:
    """Of one choice, in groups that have formed."""
    length = job.data.sequence_length
    engine = NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=VOCABULARY, sequence_length=length),
        CPU,
        length,
    )
    engine.prepare()
    engine.attach(groups)
    engine.initialise()
    count = GLOBAL_BATCH // run.micro_batch // run.layout.data_parallel_size
    if run.layout.has_stages:
        count = micro_batches_to_run(count, run.layout.pipeline_size, job.parallel.schedule)
    tokens = torch.zeros(run.micro_batch, length + 1, dtype=torch.int64)
    batches = [MicroBatch(number, {"tokens": tokens}) for number in range(count)]
    found = []
    for step in range(1, WARM_UP + steps + 1):
        dist.barrier()
        began = time.perf_counter()
        sums = engine.run_batch(step, batches, lambda *point: None)
        squares = torch.tensor(sums.squares, dtype=torch.float64)
        dist.all_reduce(squares)
        engine.apply(step, GLOBAL_BATCH * length, float(squares), lambda *point: None)
        dist.barrier()
        found.append(time.perf_counter() - began)
    engine.detach()
    return found[WARM_UP:]


def layer_s(groups: Groups, run: Run, steps: int) -> float:
    """Seconds of a layer's forward that has next to nothing to compute."""
    few_s, many_s = (
        median(steps_s(groups, run, steps, job_of(run, {**TINY, "n_layers": layers}, TINY_LENGTH)))
        for layers in (FEW, MANY)
    )
    micro_batches = GLOBAL_BATCH // run.micro_batch // run.layout.data_parallel_size
    return max(0.0, many_s - few_s) / (MANY - FEW) / micro_batches / 3  # backward is as two


def sums_s() -> tuple[float, float]:
    """Seconds of summing a little, and a lot."""
    found = []
    for numel in (LITTLE, LOT):
        numbers, times = torch.zeros(numel), []
        for _ in range(TIMES):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(numbers)
            times.append(time.perf_counter() - began)
        found.append(median(times))
    return found[0], found[1]


def _rank(rank: int, world: int, ports: Sequence[int], steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    buddies = tuple(((r + 1) % world,) for r in range(world))
    found: list[dict[str, list[float]]] = []
    calibrating = []
    remaining = iter(ports)
    try:
        while len(found) * len(runs_of(world)) < len(ports):
            found.append({})
            for run in runs_of(world):
                assignment = Assignment(
                    1, members, (), run.layout, Source(0, Tier.INITIAL), buddies, "benchmark"
                )
                share, port = dict(shares(assignment))[f"w{rank}"], next(remaining)
                store = "127.0.0.1", port
                groups = Groups(share, members[rank], store, meet_timeout_s=OPERATION_S)
                groups.form(CPU, OPERATION_S)
                found[-1][str(run)] = steps_s(groups, run, steps, job_of(run))
                if run == CALIBRATING[world]:
                    calibrating.append((*sums_s(), layer_s(groups, run, steps)))
                groups.barrier("done")
                groups.teardown()
        results.put((rank, found, calibrating, ""))
    except BaseException:
        results.put((rank, found, calibrating, traceback.format_exc()))
        raise


def measure(world: int, rounds: int, steps: int) -> tuple[list[dict[str, list[float]]], Any]:
    """By round, the seconds of each choice's steps on rank 0; and those of two sums and a layer."""
    count = rounds * len(runs_of(world))
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)
    ]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ports = [store.port for store in stores]
    ranks = [
        context.Process(target=_rank, args=(rank, world, ports, steps, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted(results.get(timeout=DEADLINE_S) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    if failed := [error for *_, error in found if error]:
        raise RuntimeError(failed[0])
    return found[0][1], found[0][2]


# ------------------------------------------------------------------------------ as planned


def devices_of(world: int, rounds: list[dict[str, list[float]]], calibrating: Any) -> Devices:
    """As the steps of DDP and Gloo's sums say."""
    little_s, lot_s, launched_s = (median(times) for times in zip(*calibrating, strict=True))
    latency_s = little_s / (2 * (world - 1))  # a ring's scatter and gather
    nbytes = 2 * LOT * 4 * (world - 1) / world
    rate = nbytes / max(lot_s - little_s, 1e-6)
    there = Devices(
        (world,),
        memory_bytes=1e12,
        flops_per_s=1e10,
        intra_bytes_per_s=rate,
        latency_s=latency_s,
        layer_s=launched_s,
        fused=False,
        overlaps=False,
    )
    run = CALIBRATING[world]
    measured = [s for found in rounds for s in found[str(run)]]
    limits = Limits(micro_batches=(run.micro_batch,), recompute=(run.recompute,))
    enough = measured * -(-STEPS_MIN // len(measured))
    found = calibrate(describe_job(job_of(run)), there, limits, run.layout, enough)
    if found is None or found.flops_per_s is None:
        raise RuntimeError(f"communication alone takes longer by the model than {run} here")
    return dataclasses.replace(there, flops_per_s=found.flops_per_s)


def predicted_s(run: Run, there: Devices) -> float:
    choice = Choice(run.layout, run.micro_batch, run.recompute)
    links = Interconnect.of(there, there.nodes)
    return step_time(describe_job(job_of(run)), choice, links).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a choice in each round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found, lines, right = {}, [], 0
    for world in CALIBRATING:
        rounds, calibrating = measure(world, arguments.rounds, arguments.steps)
        found[world] = rounds, devices_of(world, rounds, calibrating)
    for pair in PAIRS:
        rounds, there = found[pair[0].layout.world_size]
        ratio = median(
            median(times[str(pair[0])]) / median(times[str(pair[1])]) for times in rounds
        )
        planned = predicted_s(pair[0], there) / predicted_s(pair[1], there)
        same = (planned < 1) == (ratio < 1)
        right += same
        names = [str(run) for run in pair]
        lines.append({"pair": names, "predicted": round(planned, 4), "measured": round(ratio, 4)})
        print(f"{names[0]} / {names[1]}: predicted {planned:.2f}, measured {ratio:.2f}", flush=True)
    print(f"{right} of {len(PAIRS)} as predicted; load {load:.1f} before, {os.cpu_count()} cores")
    if arguments.out is not None:
        kept: dict[str, Any] = {"right": right, "pairs": lines, "load": load}
        kept["devices"] = {n: dataclasses.asdict(there) for n, (_, there) in found.items()}
        kept["rounds"] = {n: rounds for n, (rounds, _) in found.items()}
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
