"""What this machine is, whether forked workers can use CUDA, and its ceilings."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import torch

# What a job on plain processes imports beside torch: the rest of pyproject.toml is for Ray, object
# stores and the terminal.
NEEDED = (
    *("fsspec", "msgpack", "numpy", "prometheus_client", "psutil", "pydantic", "tokenizers"),
    *("xxhash", "yaml"),
)
CHILD = """
import multiprocessing, torch
{before}
def use(queue):
    try:
        torch.zeros(1, device="cuda")
        queue.put("ok")
    except Exception as error:
        queue.put(f"{{type(error).__name__}}: {{str(error)[:80]}}")
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=use, args=(queue,))
process.start()
print(queue.get())
"""


def after(before: str) -> str:
    """How a process that is forked after that finds CUDA."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (done.stdout.split("\n")[0] or done.stderr[-200:]).strip()


def seconds(function: Any, times: int = 10) -> float:
    """Of one call, by the device's clock."""
    for _ in range(3):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times / 1e3


def rates() -> dict[str, float]:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    found = {"bf16_tflops": 2 * 8192**3 / seconds(lambda: matrix @ matrix) / 1e12}
    copied_s = seconds(lambda: pinned.copy_(source, non_blocking=True), 3)
    single = torch.randn(8192, 8192, device="cuda")
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        took_s = seconds(lambda: single @ single, 3)
        found[f"fp32_{precision}_tflops"] = 2 * 8192**3 / took_s / 1e12
    return {k: round(v, 1) for k, v in (found | {"to_host_gb_per_s": 1.0737 / copied_s}).items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.parse_args()
    forked = after("import elastic_ft.worker.preload")
    line = {
        "missing": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "kernel": os.uname().release,
        "forked_clean": after(""),
        "forked_after_preload": forked,
        **rates(),
    }
    why = "" if forked == "ok" else "workers can't use CUDA after the fork server's preload"
    if line["missing"]:
        why = f"no job can run: pip install {' '.join(line['missing'])}"
    print(json.dumps({"failed": why} | line if why else line))
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
