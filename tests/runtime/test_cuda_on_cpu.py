"""What a CPU can hold the CUDA branches to: devices, forks, streams and errors, without a GPU."""

from __future__ import annotations

import subprocess
import sys

# ------------------------------------------------------------------- what workers fork from

SPIED = """
import traceback
import torch

calls = []

def spy(owner, name):
    real = getattr(owner, name, None)
    if real is None:
        return
    def wrapped(*args, **kwargs):
        caller = traceback.extract_stack()[-2]
        calls.append(f"{name} from {caller.filename}:{caller.lineno}")
        return real(*args, **kwargs)
    setattr(owner, name, wrapped)

for owner, names in (
    (torch._C, "_cuda_getDeviceCount _cuda_isCurrentStreamCapturing _cuda_init"),
    (torch._C, "_accelerator_getAccelerator"),
    (torch.cuda, "is_available device_count is_current_stream_capturing"),
    (torch.accelerator, "current_accelerator is_available current_stream"),
):
    for name in names.split():
        spy(owner, name)
import elastic_ft.runtime.preload
print(*sorted(set(calls)), sep="\\n")
"""


def test_what_workers_fork_from_asks_nothing_of_cuda() -> None:
    """A process whose parent has called cuInit can't use CUDA: each worker would die of it."""
    done = subprocess.run(
        [sys.executable, "-c", SPIED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
