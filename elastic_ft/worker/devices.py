"""Which device a worker trains on, and which GPU a host shows it.

A worker sees one GPU, number 0: torch and NCCL take the calling thread's current device in places,
and a worker trains, copies and aborts in several threads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elastic_ft.config import Job, ParallelConfig
from elastic_ft.errors import ConfigError

if TYPE_CHECKING:  # a host does without torch, and must not ask CUDA: workers fork from it
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
# What libraries say of a device that has failed; torch's own is an AcceleratorError.
SICK = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "uncorrectable ECC")
# NCCL says it, too, of what a peer had shared of its memory when that one died.
UNSURE = "unhandled cuda error"
NO_ROOM = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "_STATUS_NOT_INITIALIZED",  # a handle is memory, too
    "CUFFT_ALLOC_FAILED",
    # NCCL's last word, behind what looks like a failed device.
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
)


def device_of(parallel: ParallelConfig) -> torch.device:
    """This worker's. Raises ConfigError where the job is for GPUs and there is none to be seen."""
    import torch

    is_seen = torch.cuda.is_available()
    if parallel.wants_gpu and not is_seen:
        shown = os.environ.get(VISIBLE)
        why = "" if shown is None else f" ({VISIBLE} is {shown!r})"
        raise ConfigError(f"parallel.device: the job is for GPUs, and this worker sees none{why}")
    if parallel.wants_gpu or (is_seen and parallel.may_use_gpu):
        return torch.device("cuda", 0)
    return torch.device("cpu")


def set_nccls_defaults() -> None:
    """Unless the user has; before any thread, as it sets what they read."""
    # What NVLink's switches sum is memory of all GPUs of a machine together, that none of them can
    # leave alone: NVIDIA's own in-process restart can't do with it either.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def set_up(job: Job) -> None:
    """What CUDA's libraries are to do in this process, before they do anything."""
    import torch

    torch.set_float32_matmul_precision("high" if job.precision.tf32 else "highest")


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device's memory, which NCCL and compiled kernels take past torch's allocator."""
    import torch

    return any(
        isinstance(one, torch.OutOfMemoryError) or _says(one, NO_ROOM) for one in _chain(error)
    )


def is_lost(device: torch.device, error: BaseException) -> bool:
    """Whether this process can use ``device`` no more, as ``error`` says or as it turns out.

    CUDA's errors but for few are sticky: every later call fails, also of what is all right.
    """
    import torch

    if device.type != "cuda":
        return False
    if any(isinstance(one, torch.AcceleratorError) or _says(one, SICK) for one in _chain(error)):
        return True
    return not can_be_used(device)


def can_be_used(device: torch.device) -> bool:
    """Whether a GPU can still be used by this process, and waits for nothing."""
    import torch

    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return False
    return True


def may_be_lost(error: BaseException) -> bool:
    """Whether NCCL says so."""
    return any(_says(one, (UNSURE,)) for one in _chain(error))


def _says(error: BaseException, marks: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def gpus_of_machine() -> list[str]:
    """As ``CUDA_VISIBLE_DEVICES`` names them."""
    shown = os.environ.get(VISIBLE)
    if shown is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    named = [name.strip() for name in shown.split(",")]
    return named[: next((n for n, name in enumerate(named) if name in ("", "-1")), None)]


def one_gpu(worker: str, gpus: list[str], in_use: Iterable[str | None]) -> dict[str, str]:
    """The environment that shows ``worker`` one of ``gpus``, which others have ``in_use``.

    Where they share one, NCCL must take them for hosts of their own: it refuses two ranks of one
    host on one GPU. They talk over sockets then: slow, and as nodes do.
    """
    if not gpus:
        return {}
    used = Counter(in_use)
    gpu = min(gpus, key=lambda name: used[name])
    shared = {"NCCL_HOSTID": f"elastic-ft-{worker}"} if used[gpu] else {}
    return {VISIBLE: gpu} | shared


def device_memory_bytes(device: torch.device, workers_per_node: int) -> int:
    """Of this worker's device: a GPU's, or its share of the node's memory."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // workers_per_node
