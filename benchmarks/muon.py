"""Loss curves of Muon beside AdamW: the same model, data, schedule and number of steps, on CPUs.

    nice -n 19 python benchmarks/muon.py --out benchmarks/results/muon.json

A small decoder on Python's standard library as text, as in ``benchmarks/compression.py``. Each
optimizer is tried at the same rates with the first seed; at the rate with which its last losses
are least it trains with the other seeds, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from compression import SHOWN, make_job, train
from ranks import on_ranks

OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2)
SEEDS = (1, 2, 3)


def last(line: dict[str, Any]) -> float:
    return mean(line["losses"][-SHOWN:])


def trained(name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    optimizer = {"name": name, "lr": rate, "warmup_steps": 10}
    job = make_job("ddp", steps, {"optimizer": optimizer, "seed": seed}, world=2)
    losses, _ = on_ranks(1, train, job, strategy="ddp")[0]
    line = {"optimizer": name, "lr": rate, "seed": seed}
    line["losses"] = [round(loss, 5) for loss in losses]
    print(f"{name:6} {rate:g}, seed {seed}: last losses {last(line):.4f}", flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []

    def add(name: str, rate: float, seed: int) -> None:
        lines.append(trained(name, rate, seed, arguments.steps))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")

    for rate in RATES:
        for name in OPTIMIZERS:
            add(name, rate, SEEDS[0])
    for name in OPTIMIZERS:
        best = min((line for line in lines if line["optimizer"] == name), key=last)
        for seed in SEEDS[1:]:
            add(name, best["lr"], seed)


if __name__ == "__main__":
    main()
