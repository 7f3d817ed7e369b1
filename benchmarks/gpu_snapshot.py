"""What a snapshot of 1 B parameters at each step costs on one GPU, beside the PCIe limit. No Ray.

    python benchmarks/gpu_snapshot.py

Blocks of steps with and without snapshots take turns. ``blocked`` is what the training thread
waits for: to queue the copies, and for the copy and its digest to end before the next optimizer
step. ``longer`` is by how much a median step of a block with snapshots is longer than that of the
block without beside it. The PCIe limit is one large copy to pinned memory, timed by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import form

from elastic_ft.config import parse_job
from elastic_ft.data.dataset import open_dataset
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.models.build import build_model
from elastic_ft.state.snapshot import Snapshots

COPY_BYTES = 1 << 30
WARM_UP_STEPS = 3


def device_to_host(device: torch.device, times: int = 5) -> float:
    """Bytes per second of a copy from ``device`` to pinned memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(times + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - began))
    return statistics.median(rates[1:])


class Training:
    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        vocabulary, batch = arguments.vocabulary, arguments.batch
        job = parse_job(
            {
                "name": "gpu-snapshot",
                "steps": 1_000_000,
                "model": {"preset": arguments.preset, "kwargs": {"vocab_size": vocabulary}},
                "data": {
                    "url": "stdlib:",
                    "vocab_size": 4096,
                    "sequence_length": arguments.sequence,
                    "max_tokens": 500_000,
                },
                "batch": {"global_batch_size": batch, "micro_batch_size": batch},
                "parallel": {"strategy": "fsdp"},
                "precision": {"dtype": "bf16" if device.type == "cuda" else "fp32"},
            }
        )
        bundle = open_dataset(job.data, job.seed)
        self._data, self._batch = bundle.train, batch
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.groups = form(0, 1, self._store.port, device)
        self.engine = NativeEngine(
            job,
            lambda: build_model(
                job.model, vocab_size=bundle.vocab_size, sequence_length=arguments.sequence
            ),
            device,
            arguments.sequence,
        )
        self.engine.prepare()
        self.engine.attach(self.groups)
        self.engine.initialise()
        self.snapshots = Snapshots("w0", device.type == "cuda", print)
        self._count = itertools.count(1)

    def step(self, snapshot: bool) -> tuple[float, float]:
        """One step, followed by the beginning of its snapshot. Seconds: in all, blocked."""
        number, began = next(self._count), time.perf_counter()
        first = number * self._batch
        samples = [self._data[(first + i) % len(self._data)] for i in range(self._batch)]
        micro_batch = MicroBatch(0, self._data.collate(samples))
        sums = self.engine.run_batch(number, [micro_batch], lambda *_: None)
        waited = time.perf_counter()
        self.snapshots.wait(self.groups.deadline())
        self.snapshots.drop_before(self.snapshots.newest())
        blocked_s = time.perf_counter() - waited
        self.engine.apply(number, sums.tokens, sums.squares, lambda *_: None)
        if snapshot:
            queued = time.perf_counter()
            self.snapshots.take(number, self.engine.state(), self.groups, {}, lambda *_: None)
            blocked_s += time.perf_counter() - queued
        return time.perf_counter() - began, blocked_s

    def block(self, snapshot: bool, steps: int) -> tuple[float, float]:
        """Medians over a block. Its first step still waits for what the block before began."""
        self.step(snapshot)
        times = [self.step(snapshot) for _ in range(steps)]
        return statistics.median(t for t, _ in times), statistics.median(b for _, b in times)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    training = Training(arguments, device)
    for _ in range(WARM_UP_STEPS):
        training.step(True)
    rounds = []
    for number in range(arguments.rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {snapshot: training.block(snapshot, arguments.steps) for snapshot in order}
        (with_s, blocked_s), (without_s, _) = found[True], found[False]
        rounds.append({"with_s": with_s, "without_s": without_s, "blocked_s": blocked_s})
    training.snapshots.wait(training.groups.deadline())
    training.snapshots.close()
    tensors = [tensor.local for tensor in training.engine.state().values()]
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    training.groups.teardown()
    return {"state_bytes": nbytes, "rounds": rounds}


def report(found: dict[str, Any], bytes_per_s: float) -> dict[str, Any]:
    """Prints it for people. Returns the same figures, shares of a step among them."""
    nbytes, rounds = found["state_bytes"], found["rounds"]
    line: dict[str, Any] = {}
    for name, values in (
        ("blocked", [r["blocked_s"] / r["without_s"] for r in rounds]),
        ("longer", [r["with_s"] / r["without_s"] - 1 for r in rounds]),
    ):
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name}: {middle:.2%} of a step ({low:.2%} to {high:.2%})")
        line[name] = [round(share, 5) for share in (middle, low, high)]
    step_s = statistics.median(r["without_s"] for r in rounds)
    print(f"a step without snapshots: {step_s:.3f} s; {nbytes / 1e9:.1f} GB of state")
    print(f"PCIe limit: {bytes_per_s / 1e9:.1f} GB/s, {nbytes / bytes_per_s:.3f} s for the state")
    line |= {"step_s": round(step_s, 5), "state_bytes": nbytes}
    return line | {"to_host_gb_per_s": round(bytes_per_s / 1e9, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="decoder-1b")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu-snapshot.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: this benchmark needs one GPU")
    device = torch.device("cuda", 0)
    rate = device_to_host(device)
    found = measure(arguments, device)
    print(json.dumps(report(found, rate)), flush=True)
    values = {name: str(value) for name, value in vars(arguments).items()}
    name = torch.cuda.get_device_name(device)
    record = {"device": name, "arguments": values, "bytes_per_s": rate, **found}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
