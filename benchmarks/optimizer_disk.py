"""What AdamW's step takes with its state in host memory, and in files of the machine's disk.

Files are read and written a chunk at a time, past the page cache of before, and synced: in place,
and into another file that then takes the old one's place, as a snapshot that is whole would need.

    python benchmarks/optimizer_disk.py --out benchmarks/results/optimizer-disk.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CHUNK = 1 << 20  # parameters
ARRAYS = 3  # weights and two moments, float32
ROUNDS = 5


def adamw(state: torch.Tensor, gradient: torch.Tensor) -> None:
    """``state`` [ARRAYS, n]: one step, in place."""
    weights, first, second = state
    torch._fused_adamw_(
        *([weights], [gradient], [first], [second], [], [torch.tensor(5.0)]),
        **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8},
        **{"amsgrad": False, "maximize": False},
    )


def in_memory(chunks: int) -> Callable[[], None]:
    state, gradient = torch.zeros(ARRAYS, chunks * CHUNK), torch.randn(chunks * CHUNK)
    return lambda: adamw(state, gradient)


def on_disk(chunks: int, path: Path, *, anew: bool) -> Callable[[], None]:
    """``anew``: written to another file, which takes its place."""
    buffer, gradient = torch.zeros(ARRAYS, CHUNK), torch.randn(CHUNK)
    raw = memoryview(buffer.view(torch.uint8).numpy()).cast("B")
    with path.open("wb") as file:
        for _ in range(chunks):
            file.write(raw)
        os.fsync(file.fileno())
    other = path.with_suffix(".new")

    def step() -> None:
        source = os.open(path, os.O_RDWR)
        target = os.open(other, os.O_RDWR | os.O_CREAT | os.O_TRUNC) if anew else source
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        for chunk in range(chunks):
            at = chunk * len(raw)
            assert os.preadv(source, [raw], at) == len(raw)
            adamw(buffer, gradient)
            assert os.pwritev(target, [raw], at) == len(raw)
        os.fsync(target)
        for file in {source, target}:
            os.close(file)
        if anew:
            other.replace(path)

    return step


def seconds_of(step: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        step()
        found.append(round(time.perf_counter() - began, 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chunks = -(-given.parameters // CHUNK)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        file = Path(folder) / "slab"
        ways = {
            "memory": in_memory(chunks),
            "disk, in place": on_disk(chunks, file, anew=False),
            "disk, a file anew": on_disk(chunks, file, anew=True),
        }
        found: dict[str, Any] = {name: seconds_of(step) for name, step in ways.items()}
    least = statistics.median(found["memory"])
    for name, steps in found.items():
        median = statistics.median(steps)
        print(f"{name}: {median:.3f} s ({min(steps):.3f}-{max(steps):.3f}), {median / least:.1f}x")
    result = {"parameters": chunks * CHUNK, "load": os.getloadavg()[0], "seconds": found}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
