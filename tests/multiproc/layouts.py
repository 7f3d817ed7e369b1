"""The small model, data and layouts that tests of layouts share. Workers import this module.

Heads and positions divide by 2 and 3, the vocabulary by neither; micro-batches do not divide
evenly over data ranks; gradients are clipped in most steps. Tensor parallelism, which sends many
messages for each layer and micro-batch, has fewer of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import plan_layout
from elastic_ft.engines.base import MicroBatch
from elastic_ft.groups.waits import WAITS, SecondsByKind
from tests.multiproc import pool
from tests.multiproc.harness import make_job

STEPS = 20
MODEL: dict[str, Any] = {
    "preset": "decoder-1m",
    "kwargs": {
        "dim": 24,
        "n_layers": 4,
        "n_heads": 12,
        "n_kv_heads": 6,
        "ffn_dim": 36,
        "vocab_size": 101,
    },
}
MIXTURE: dict[str, Any] = {
    "preset": "decoder-moe-4m",
    "kwargs": {
        "dim": 20,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "ffn_dim": 20,
        "n_experts": 7,
        "expert_ffn_dim": 16,
        "router_loss": 0.01,
        "bias_rate": 0.01,
        "vocab_size": 101,
    },
}
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "model": MODEL,
    "batch": {"global_batch_size": 10, "micro_batch_size": 2},
    "data": {"path": "tests.multiproc.tiny:counted", "kwargs": {}},
    "optimizer": {"lr": 3e-3, "grad_clip": 0.5},
}

# name -> (data-parallel strategy, workers, parallel section)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp4": ("ddp", 4, {}),
    "fsdp4": ("fsdp", 4, {}),
    "hsdp2x2": ("hsdp", 4, {}),
    "ddp1-tp2": ("ddp", 2, {"tp": 2}),
    "ddp1-tp3": ("ddp", 3, {"tp": 3}),
    "ddp2-tp2": ("ddp", 4, {"tp": 2}),
    "fsdp2-tp2": ("fsdp", 4, {"tp": 2}),
    "hsdp2x2-tp2": ("hsdp", 8, {"tp": 2}),
    "pp2-ddp1 gpipe": ("ddp", 2, {"pp": 2, "schedule": "gpipe"}),
    "pp2-ddp1 1f1b": ("ddp", 2, {"pp": 2}),
    "pp2-ddp1 interleaved1f1b": ("ddp", 2, {"pp": 2, "schedule": "interleaved1f1b"}),
    "pp2-ddp1 zero_bubble": ("ddp", 2, {"pp": 2, "schedule": "zero_bubble"}),
    "pp3-ddp1 1f1b": ("ddp", 3, {"pp": 3}),
    "pp4-ddp1 gpipe": ("ddp", 4, {"pp": 4, "schedule": "gpipe"}),
    "pp2-ddp2 1f1b": ("ddp", 4, {"pp": 2}),
    "pp2-fsdp2 1f1b": ("fsdp", 4, {"pp": 2}),
    "pp2-fsdp2 interleaved1f1b": ("fsdp", 4, {"pp": 2, "schedule": "interleaved1f1b"}),
    "pp2-fsdp2 zero_bubble": ("fsdp", 4, {"pp": 2, "schedule": "zero_bubble"}),
    "pp2-ddp1-tp2 1f1b": ("ddp", 4, {"pp": 2, "tp": 2}),
    "pp2-ddp2-tp2 1f1b": ("ddp", 8, {"pp": 2, "tp": 2}),
    "pp2-fsdp2-tp2 1f1b": ("fsdp", 8, {"pp": 2, "tp": 2}),
    "ddp1-cp2": ("ddp", 2, {"cp": 2}),
    "ddp1-cp3": ("ddp", 3, {"cp": 3}),
    "fsdp2-cp2": ("fsdp", 4, {"cp": 2}),
    "hsdp2x2-cp2 ulysses": ("hsdp", 8, {"cp": 2, "cp_method": "ulysses"}),
    "ddp1-cp2-tp2": ("ddp", 4, {"cp": 2, "tp": 2}),
    "pp2-ddp1-cp2 1f1b": ("ddp", 4, {"pp": 2, "cp": 2, "cp_method": "ulysses"}),
    # Seven experts on three ranks: 3, 2, 2, each cut no further.
    "fsdp3-ep3": ("fsdp", 3, {"ep": 3, "activation_checkpointing": "selective"}),
    "fsdp4-ep2": ("fsdp", 4, {"ep": 2, "activation_checkpointing": "selective"}),
    "fsdp5-ep5": ("fsdp", 5, {"ep": 5}),  # 2, 2, 2, 1 and none
    # Three shards divide no matrix: experts are cut.
    "fsdp6-ep2": ("fsdp", 6, {"ep": 2, "reduce_gradients": "step"}),
    "fsdp2-cp2-ep4": ("fsdp", 4, {"cp": 2, "ep": 4, "activation_checkpointing": "selective"}),
    "fsdp2-cp3-ep2": ("fsdp", 6, {"cp": 3, "ep": 2, "activation_checkpointing": True}),
    "ddp2-cp2 experts": ("ddp", 4, {"cp": 2, "cp_method": "ulysses"}),
    "hsdp2x2-ep2": ("hsdp", 4, {"ep": 2, "activation_checkpointing": True}),
    "ddp3 zero0": ("ddp", 3, {"engine": "deepspeed", "zero_stage": 0}),
    "fsdp3 zero1": ("ddp", 3, {"engine": "deepspeed", "zero_stage": 1}),
    "fsdp3 zero2": ("ddp", 3, {"engine": "deepspeed", "zero_stage": 2}),
    "fsdp3 zero3": ("ddp", 3, {"engine": "deepspeed", "zero_stage": 3}),
}


# Who has which experts, where that is not in order: as many as DTensor would give each, or others.
OWNERS = {
    "fsdp3-ep3": (2, 0, 1, 2, 0, 1, 0),
    "fsdp4-ep2": (0, 1, 0, 1, 1, 0, 1),
    "fsdp6-ep2": (1, 0, 1, 1, 0, 0, 1),
}

# What a layout is trained with: golden losses are kept of each.
VARIANTS: dict[str, dict[str, Any]] = {
    "deep": {},
    "shallow": {
        "model": MODEL | {"kwargs": MODEL["kwargs"] | {"n_layers": 2}},
        "batch": {"global_batch_size": 6, "micro_batch_size": 2},
    },
}
VARIANTS["experts"] = {
    "model": MIXTURE,
    "batch": {"global_batch_size": 14, "micro_batch_size": 2},
}
VARIANTS["wide"] = VARIANTS["shallow"] | {"batch": COMMON["batch"]}


def variant_of(name: str) -> str:
    parallel = LAYOUTS[name][2]
    if "ep" in parallel or name.endswith(" experts"):
        return "experts"
    if "tp" not in parallel:
        return "deep"
    return "wide" if name == "hsdp2x2-tp2" else "shallow"


def job_of(name: str, **sections: Any) -> Job:
    strategy, _, parallel = LAYOUTS[name]
    sections = VARIANTS[variant_of(name)] | sections
    parallel = parallel | {"shard_size": 2} if strategy == "hsdp" else parallel
    return make_job(strategy, workers=1, parallel=parallel, **(COMMON | sections))


def train_from_the_start(
    port: int, generation: int, rank: int, world: int, job: Job, steps: int
) -> tuple[str, list[dict[str, float]]]:
    """For ``pool.Pool``. Returns the layout, and each step's loss and gradient norm."""
    with attached(port, generation, rank, world, job) as (engine, data, groups):
        found = pool.train(job, engine, data, groups, range(1, steps + 1))
        return str(groups.assignment.layout), found


def timed_from_the_start(
    port: int, generation: int, rank: int, world: int, job: Job, steps: int
) -> tuple[str, list[dict[str, float]], tuple[SecondsByKind, SecondsByKind]]:
    """As ``train_from_the_start``, and what ``WAITS.take`` says of the last step."""
    with attached(port, generation, rank, world, job) as (engine, data, groups):
        found = pool.train(job, engine, data, groups, range(1, steps))
        WAITS.begin()
        found += pool.train(job, engine, data, groups, [steps])
        waits = WAITS.take()
        WAITS.forget()
        return str(groups.assignment.layout), found, waits


def collectives_of(
    port: int, generation: int, rank: int, world: int, job: Job
) -> tuple[dict[str, int], list[dict[str, float]]]:
    """For ``pool.Pool``. Returns how many collectives of each kind the second step has, and what
    ``pool.train`` does of both."""
    with attached(port, generation, rank, world, job) as (engine, data, groups):
        first = pool.train(job, engine, data, groups, [1])
        with Traffic() as traffic:
            second = pool.train(job, engine, data, groups, [2])
        return dict(traffic.counts), first + second


def numbers_along(
    port: int, generation: int, rank: int, world: int, job: Job, numbers: list[float]
) -> list[float] | None:
    """For ``pool.Pool``. Each of ``numbers`` is said by one rank; None: they did not come along."""
    with attached(port, generation, rank, world, job) as (engine, data, _):
        along = engine.along
        along.ask(lambda *_: [n if at % world == rank else 0.0 for at, n in enumerate(numbers)])
        batch = data.train.collate([data.train[0]])
        engine.run_batch(1, [MicroBatch(0, batch), MicroBatch(1, batch)], pool.reach)
        found: list[float] | None = along.told() if along.is_told else None
        engine.run_batch(2, [MicroBatch(0, batch)], pool.reach)
        assert not along.is_told, "it was asked for one step"
        return found


def held_out_loss(port: int, generation: int, rank: int, world: int, job: Job) -> float:
    """For ``pool.Pool``. Of four samples in two batches, which every data rank has."""
    with attached(port, generation, rank, world, job) as (engine, data, _):
        return _evaluated(engine, data)


def trained_and_held_out(
    port: int, generation: int, rank: int, world: int, job: Job, steps: int
) -> tuple[list[dict[str, float]], float]:
    """As ``train_from_the_start``, and then as ``held_out_loss``."""
    with attached(port, generation, rank, world, job) as (engine, data, groups):
        found = pool.train(job, engine, data, groups, range(1, steps + 1))
        return found, _evaluated(engine, data)


def _evaluated(engine: Any, data: Any) -> float:
    samples = [data.train[index] for index in range(4)]
    batches = [MicroBatch(n, data.train.collate(samples[n : n + 2])) for n in (0, 2)]
    loss, tokens, _ = engine.evaluate(batches)
    sums = torch.tensor([loss, float(tokens)], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


class Traffic(TorchDispatchMode):
    """Counts collectives by their kind, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = str(func).partition(".")
        if kind == "c10d":
            self.counts[name.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def attached(
    port: int, generation: int, rank: int, world: int, job: Job
) -> Iterator[tuple[Any, Any, Any]]:
    """The job's engine with the state of step 0, its data, and groups."""
    layout, _ = plan_layout(job.parallel.wish, world)
    layout = replace(layout, owners=OWNERS.get(str(layout), ()))
    engine, data = pool.make_engine(job)
    groups = pool.form(port, generation, rank, layout)
    try:
        engine.attach(groups)
        engine.initialise()
        engine.restored()
        yield engine, data, groups
    finally:
        groups.abort("the end")
        engine.detach()
        groups.teardown()
