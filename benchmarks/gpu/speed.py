"""Tokens per second of one worker: ours, and a plain loop over the same model."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from elastic_ft.config import parse_job
from elastic_ft.hosts.local import run_local
from elastic_ft.models.decoder import PRESETS, Decoder
from elastic_ft.models.loss import cross_entropy_sum
from elastic_ft.observe.run_folder import read_lines

PEAK_FLOPS = 989e12  # bf16 of an H100 or H200
SIZES = {"cuda": ("decoder-160m", 16, 2048, 40), "cpu": ("decoder-1m", 2, 64, 15)}
VOCABULARY = 4096
WARM_STEPS = 5


def bare(device: str) -> list[float]:
    preset, batch, length, steps = SIZES[device]
    model = Decoder(replace(PRESETS[preset], vocab_size=VOCABULARY))
    model.initialise(3)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    times = []
    for _ in range(WARM_STEPS + steps):
        began = time.perf_counter()
        tokens = torch.randint(0, VOCABULARY, (batch, length + 1)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / (batch * length)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss) + float(norm)  # as ours waits for them
        times.append(time.perf_counter() - began)
    return times[WARM_STEPS:]


def ours(device: str) -> list[float]:
    preset, batch, length, steps = SIZES[device]
    job = parse_job(
        {
            "name": "gpu",
            "steps": WARM_STEPS + steps,
            "model": {"preset": preset},
            "data": {"url": "stdlib:", "vocab_size": VOCABULARY, "sequence_length": length},
            "batch": {"global_batch_size": batch, "micro_batch_size": batch},
            "precision": {"dtype": "bf16"},
            "parallel": {"device": device},
            "checkpoint": {"every_s": None, "final": False},
        }
    )
    folder = tempfile.mkdtemp(prefix="gpu-kit-")
    found = run_local(job, folder)
    if found["status"] != "completed":
        raise SystemExit(found["reason"])
    lines = read_lines(Path(folder) / "steps.jsonl")
    at_s = [line["applied_at_s"] for line in lines]
    return [b - a for a, b in itertools.pairwise(at_s)][WARM_STEPS - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("bare", "ours"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    preset, batch, length, _ = SIZES[options.device]
    step_s = statistics.median({"bare": bare, "ours": ours}[options.what](options.device))
    shape = replace(PRESETS[preset], vocab_size=VOCABULARY)
    with torch.device("meta"):
        numel = sum(p.numel() for n, p in Decoder(shape).named_parameters() if "embedding" not in n)
    flops = batch * length * (6 * numel + 6 * shape.n_layers * shape.dim * length)
    mfu = round(flops / step_s / PEAK_FLOPS, 4) if options.device == "cuda" else None
    rate = round(batch * length / step_s)
    print(
        json.dumps(
            {"preset": preset, "step_s": round(step_s, 5), "tokens_per_s": rate} | {"mfu": mfu}
        )
    )


if __name__ == "__main__":
    main()
