"""Loss curves and bytes a step of each way to send or compute less, beside fp32, on CPUs.

    nice -n 19 python benchmarks/compression.py --out benchmarks/results/compression.json

One seed, a small decoder on Python's standard library as text. Bytes are those that a rank sends in
a step by the algorithms that bandwidths are usually counted by: rings, and each part to its rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ft.config import Job, parse_job
from elastic_ft.core.batches import DataOrder, deal, step_batch
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import build_model

SHOWN = 10  # last losses that are averaged
MODEL = {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}
BF16 = {"dtype": "bf16"}
# name -> strategy, sections
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp fp32": ("ddp", {}),
    "ddp, replicas int8": ("ddp", {"comm": {"compress_replicas": "int8"}}),
    "ddp, replicas powersgd 4": ("ddp", {"comm": {"compress_replicas": "powersgd"}}),
    "ddp, replicas powersgd 16": (
        "ddp",
        {"comm": {"compress_replicas": "powersgd", "powersgd_rank": 16}},
    ),
    "fsdp fp32": ("fsdp", {}),
    "fsdp, shards int8": ("fsdp", {"comm": {"compress_shards": "int8"}}),
    "fsdp bf16": ("fsdp", {"precision": BF16}),
    "fsdp bf16, shards int8": ("fsdp", {"precision": BF16, "comm": {"compress_shards": "int8"}}),
    "fsdp fp8 tensorwise": ("fsdp", {"precision": {**BF16, "fp8": "tensorwise"}}),
    "fsdp fp8 rowwise": ("fsdp", {"precision": {**BF16, "fp8": "rowwise"}}),
}


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in collectives of all ranks."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.nbytes, self._world = 0.0, world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = str(func).partition(".")
        name = name.partition(".")[0].strip("_")
        if kind == "c10d":
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            second = args[1] if isinstance(args[1], torch.Tensor) else first
            whole = max(first.nbytes, second.nbytes)
            self.nbytes += (
                whole * (self._world - 1) / self._world * (2 if name == "allreduce" else 1)
            )
        return func(*args, **(kwargs or {}))


def make_job(strategy: str, steps: int, sections: dict[str, Any], world: int) -> Job:
    return parse_job(
        {
            "name": "compression",
            "seed": 1,
            "steps": steps,
            "model": {"preset": "decoder-1m", "kwargs": MODEL},
            "data": {"url": "stdlib:", "vocab_size": 512, "sequence_length": 64},
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
            "optimizer": {"lr": 3e-3, "warmup_steps": 10},
            "parallel": {"strategy": strategy},
            "elastic": {"max_workers": world},
        }
        | sections
    )


def train(groups: Groups, job: Job) -> tuple[list[float], float]:
    """Returns each step's loss, and the bytes that this rank sends in one."""
    data = open_dataset(job.data, job.seed)
    vocabulary, length = data.vocab_size, data.sequence_length
    assert length is not None and groups.rank is not None

    def factory() -> torch.nn.Module:
        return build_model(job.model, vocab_size=vocabulary, sequence_length=length)

    engine = NativeEngine(job, factory, torch.device("cpu"), length)
    engine.prepare()
    engine.attach(groups)
    engine.initialise()
    engine.restored()
    order, batch = DataOrder(job.seed, len(data.train)), job.batch
    world = dist.get_world_size()
    mine = deal(batch.micro_batches, world)[groups.rank]
    losses, sent = [], Sent(world)
    for step in range(1, job.steps + 1):
        dealt = step_batch(order, step, batch.global_batch_size, batch.micro_batch_size, mine)
        samples = ([data.train[order.dataset_index(i)] for i in ids] for ids in dealt)
        micro_batches = [
            MicroBatch(mine.start + n, data.train.collate(some)) for n, some in enumerate(samples)
        ]
        with sent:
            sums = engine.run_batch(step, micro_batches, lambda *point: None)
        summed = torch.tensor([sums.loss, sums.tokens, sums.squares], dtype=torch.float64)
        dist.all_reduce(summed)
        engine.apply(step, int(summed[1]), float(summed[2]), lambda *point: None)
        losses.append(float(summed[0] / summed[1]))
    return losses, sent.nbytes / job.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--only", default="", help="modes whose name has this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for name, (strategy, sections) in MODES.items():
        if arguments.only not in name:
            continue
        job = make_job(strategy, arguments.steps, sections, arguments.world)
        found = on_ranks(arguments.world, train, job, strategy=strategy)  # type: ignore[arg-type]
        losses, sent = found[0]
        last = losses[-SHOWN:]
        line = {"mode": name, "world": arguments.world, "bytes_per_step": round(sent)}
        lines.append(line | {"losses": [round(loss, 5) for loss in losses]})
        print(
            f"{name:26} loss at {len(losses) // 4} {losses[len(losses) // 4 - 1]:.4f}, mean of the "
            f"last {len(last)} {sum(last) / len(last):.4f}, {sent / 1e6:.3f} MB a step",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
