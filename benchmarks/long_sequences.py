"""Measured against predicted peak memory where sequences and vocabularies are large, on CPUs.

    python benchmarks/long_sequences.py --out benchmarks/results/long-sequences.json

As ``benchmarks/memory.py``: what malloc has handed out in a step's fullest moment, of the fullest
rank. One micro-batch of one sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from memory import measure

from elastic_ft.config import Job, parse_job
from elastic_ft.core.layouts.layout import plan_layout
from elastic_ft.core.layouts.memory_costs import memory
from elastic_ft.core.layouts.work import Choice
from elastic_ft.models.describe import describe_job

SMALL = {"n_layers": 2, "dim": 64, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 192}
CHUNK = 256
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
    *(
        ("T=8k", 512, 8192, cp, {"loss_chunk_tokens": CHUNK, "strategy": "ddp", "cp": cp})
        for cp in (2, 4)
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
        lines.append(line)
        print(
            f"{name:16} {layout!s:12} {parallel}: predicted {predicted.total / 1e6:.1f} MB, "
            f"measured {measured / 1e6:.1f} MB, {predicted.total / measured - 1:+.1%}",
            flush=True,
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
