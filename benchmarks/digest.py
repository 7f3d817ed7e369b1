"""How fast a rank digests its part of the state at the end of a job (``state.digest``).

    python benchmarks/digest.py

Digests a decoder's float32 tensors, as DDP has them (whole) and as FSDP2 and tensor parallelism cut
them (rows, columns), on one core. Seconds of that core: a busy machine changes little. Beside it,
what one rank's sha256 over everything takes, which this was before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch

from elastic_ft.core.sharding import Box
from elastic_ft.state.digest import digest_sums
from elastic_ft.state.tensors import StateTensor

SHAPES = ((32_000, 2048), (2048, 2048), (2048, 5632), (5632, 2048), (2048,))
RANKS, STATE_BYTES = 8, 100e9


def boxes(shape: tuple[int, ...]) -> dict[str, Box]:
    """This rank's part of a tensor, by how it is cut."""
    half_row = Box((shape[0] // 2, *(0 for _ in shape[1:])), (shape[0] // 2, *shape[1:]))
    found = {"whole": Box.whole(shape), "rows": half_row}
    if len(shape) == 2:
        found["columns"] = Box((0, shape[1] // 2), (shape[0], shape[1] // 2))
    return found


def measure(cut: str, repeats: int) -> float:
    """Bytes a second."""
    nbytes, spent_s = 0, 0.0
    for shape in SHAPES:
        whole = torch.randn(shape)
        box = boxes(shape).get(cut)
        if box is None:
            continue
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        tensor = StateTensor(shape, box, whole[index].clone())
        for _ in range(repeats):
            began = time.process_time()
            digest_sums("model.w", tensor)
            spent_s += time.process_time() - began
            nbytes += tensor.local.numel() * tensor.local.element_size()
    return nbytes / spent_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/digest.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = {cut: measure(cut, arguments.repeats) for cut in ("whole", "rows", "columns")}
    block = os.urandom(1 << 26)
    began = time.process_time()
    hashlib.sha256(block).hexdigest()
    sha256 = len(block) / (time.process_time() - began)
    slowest = min(rates.values())
    found = {
        "bytes_per_s_per_core": {cut: round(rate) for cut, rate in rates.items()},
        "sha256_bytes_per_s": round(sha256),
        "s_for_100_gb_on_8_ranks": round(STATE_BYTES / RANKS / slowest, 2),
        "s_for_100_gb_by_one_sha256": round(STATE_BYTES / sha256, 1),
    }
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
