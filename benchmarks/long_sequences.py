"""Measured against predicted peak memory where sequences and vocabularies are large, on CPUs; and
where ranks share positions, what attention sends.

    python benchmarks/long_sequences.py --out benchmarks/results/long-sequences.json

Memory as in ``benchmarks/memory.py``: bytes of tensors in a step's fullest moment, of the fullest
rank. Two micro-batches of one sample. Sent: what a rank sends the others that share its positions
in one step, by the sizes that its collectives are given.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import MICRO_BATCHES, measure, of_ranks, trainer_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_ft.config import Job, parse_job
from elastic_ft.core.layouts.layout import plan_layout
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.work import Choice
from elastic_ft.groups.groups import Groups
from elastic_ft.models.describe import describe_job

SMALL = {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 192}
CHUNK = 256
FROM = {"all_to_all_single": 0, "allgather_base": 0, "reduce_scatter_base": 1, "allreduce": 0}
# name, vocabulary, tokens, world, parallel section
CASES: list[tuple[str, int, int, int, dict[str, Any]]] = [
    *(
        (f"V=128k, T={length}", 128_256, length, 1, {"loss_chunk_tokens": chunk})
        for length in (1024, 4096)
        for chunk in (None, CHUNK)
    ),
    *(
        ("T=8k", 512, 8192, 1, {"loss_chunk_tokens": CHUNK, "activation_checkpointing": again})
        for again in (False, "selective", True)
    ),
    ("T=32k", 512, 32_768, 1, {"loss_chunk_tokens": CHUNK}),
    *(
        (name, 512, length, cp, {"loss_chunk_tokens": CHUNK, "cp": cp, "cp_method": method})
        for name, length in (("T=8k", 8192), ("T=32k", 32_768))
        for cp in (2, 4)
        for method in ("all_gather", "ulysses")
    ),
]


def make_job(vocabulary: int, length: int, parallel: dict[str, Any]) -> Job:
    return parse_job(
        {
            "name": "memory",
            "steps": 3,
            "model": {"preset": "decoder-1m", "kwargs": {**SMALL, "max_sequence_length": length}},
            "data": {"url": "stdlib:", "vocab_size": vocabulary, "sequence_length": length},
            "batch": {"global_batch_size": 2, "micro_batch_size": 1},
            "parallel": parallel,
        }
    )


class Sent(TorchDispatchMode):
    """Bytes to other ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.nbytes = group, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = str(func).partition(".")[2].partition(".")[0].strip("_")
        if str(func).startswith(("c10d.", "_c10d_functional.")) and self._is_mine(args):
            given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            assert kind in FROM, f"no known way to count {func}"
            whole = given[FROM[kind]]
            self.nbytes += whole.nbytes * (1 - 1 / dist.get_world_size(self.group))
        return func(*args, **(kwargs or {}))

    def _is_mine(self, args: Any) -> bool:
        names = [x for x in args if isinstance(x, str)]
        groups = [x for x in args if isinstance(x, torch.ScriptObject)]
        of = [dist.ProcessGroup.unbox(x) for x in groups if "ProcessGroup" in str(x._type())]
        return self.group.group_name in [*names, *(group.group_name for group in of)]


def sent_of_rank(groups: Groups, job: Job, micro_batches: int) -> int:
    """Bytes of the second step."""
    step = trainer_of(groups, job, micro_batches)
    step(0), step(1)
    assert groups.context is not None
    with Sent(groups.context) as sent:
        step(2)
    return round(sent.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    for name, vocabulary, length, world, parallel in CASES:
        if arguments.only not in f"{name} {parallel}":
            continue
        job = make_job(vocabulary, length, parallel)
        layout, _ = plan_layout(job.parallel.wish, world)
        choice = Choice(layout, 1, job.parallel.activation_checkpointing)
        predicted = memory(describe_job(job), choice, fused=False)
        measured = measure(job, layout)
        line = {"case": name, "layout": str(layout), "parallel": parallel}
        line |= {"predicted": {k: round(v) for k, v in predicted._asdict().items()}}
        line |= {"predicted_bytes": round(predicted.total), "measured_bytes": measured}
        line["measured_by"] = "tensors"
        sent = ""
        if layout.cp > 1:
            line["sent_bytes"] = max(of_ranks(job, layout, MICRO_BATCHES, sent_of_rank))
            sent = f", sent {line['sent_bytes'] / 1e6:.2f} MB"
        lines.append(line)
        print(
            f"{name:16} {layout!s:12} {parallel}: predicted {predicted.total / 1e6:.1f} MB, "
            f"measured {measured / 1e6:.1f} MB, {predicted.total / measured - 1:+.1%}{sent}",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
