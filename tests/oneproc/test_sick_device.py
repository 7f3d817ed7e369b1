"""A device that fails in its process costs the worker, and tells so; without a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ft.core.assignment import Member
from elastic_ft.core.events import ITS_DEVICE
from elastic_ft.errors import GroupBroken, UsageError
from elastic_ft.faults import ON_GPU, PointFault, Points
from elastic_ft.worker import trouble


class ProcessEnded(BaseException):
    """Stands in for the end of the process."""


def explained(
    monkeypatch: pytest.MonkeyPatch,
    *errors: BaseException,
    device: str = "cuda",
    is_over: bool = False,
) -> list[Any]:
    """What a worker tells of one after the other, and how it ends if it does."""
    sent: list[Any] = []

    def end(code: int) -> None:
        sent.append(code)
        raise ProcessEnded

    monkeypatch.setattr(trouble.os, "_exit", end)
    member, points = Member("w0", "n0", "localhost", 0), Points("w0", (), lambda index: None)
    points.begin(7)
    told = trouble.Trouble(member, points, sent.append, lambda seconds: is_over)
    told.device = torch.device(device)
    for error in errors:
        with contextlib.suppress(ProcessEnded):
            told.explain(1, error, restored=True)
    return sent


# What torch makes of it, and then NCCL's own last word.
NCCL_SAYS = (
    "NCCL error in: NCCLUtils.cpp:99, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


def caused(by: BaseException) -> GroupBroken:
    error = GroupBroken("forming generation 3: it broke")
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        caused(torch.AcceleratorError("CUDA error: unspecified launch failure")),
    ],
    ids=str,
)
def test_a_sick_device_costs_its_worker(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The process can use it no more: no retry in it, and no state of it is offered."""
    told, code = explained(monkeypatch, error)
    assert (told.whose, told.usage, told.step, told.node) == (ITS_DEVICE, False, 7, "n0")
    assert code == trouble.DEVICE_LOST


def test_an_error_that_leaves_the_device_sick_is_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its text: from then on every call fails."""

    def query() -> bool:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(query=query))
    told, code = explained(monkeypatch, ValueError("a label is out of range"))
    assert told.whose == ITS_DEVICE and "ValueError: a label is out of range" in told.error
    assert code == trouble.DEVICE_LOST


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(NCCL_SAYS + "Cuda failure 719 'unspecified launch failure'"),
        caused(dist.DistBackendError(NCCL_SAYS + "Cuda failure 1 'invalid argument'")),
    ],
    ids=str,
)
@pytest.mark.parametrize("answers", [True, False])
def test_nccls_word_of_a_device_is_checked(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, answers: bool
) -> None:
    """It says the same of memory that a peer had shared and that went with it: a survivor ended
    itself, and its node was blamed. A second time it is believed."""

    def query() -> bool:
        if not answers:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return True

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(query=query))
    *tried, told, code = explained(monkeypatch, *[error] * (1 + answers))
    assert [type(message).__name__ for message in tried] == ["CollectiveFailed"] * answers
    assert told.whose == ITS_DEVICE and code == trouble.DEVICE_LOST


def test_nccls_word_that_a_lost_peer_explains_is_no_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers lost one after the other while a step is tried: each survivor would have ended."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(query=lambda: True))
    error = dist.DistBackendError(NCCL_SAYS + "Cuda failure 1 'invalid argument'")
    told = explained(monkeypatch, error, error, error, is_over=True)
    assert [type(message).__name__ for message in told] == ["CollectiveFailed"] * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_users_errors_and_lost_peers_are_what_they_were(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(query=lambda: False)
    )
    lost = dist.DistBackendError("NCCL error: remote process exited or there was a network error")
    told = explained(monkeypatch, ValueError("a typo"), lost, device=device)
    assert [type(message).__name__ for message in told] == ["WorkerRaised", "CollectiveFailed"]
    assert told[0].whose == ""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        dist.DistBackendError(NCCL_SAYS + "Failed to CUDA calloc 6291456 bytes"),
        dist.DistBackendError(NCCL_SAYS + "Failed to CUDA malloc 2097152 bytes"),
        caused(dist.DistBackendError(NCCL_SAYS + "Cuda failure 2 'out of memory'")),
        dist.DistBackendError(NCCL_SAYS + "Cuda failure 'out of memory'"),
    ],
    ids=str,
)
def test_memory_that_is_out_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(query=lambda: False)
    )
    again, told, code = explained(monkeypatch, error, error)
    assert type(again).__name__ == "CollectiveFailed" and "out of device memory" in again.error
    assert told.whose == ITS_DEVICE and code == trouble.DEVICE_LOST


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would break the GPU of this process")
@pytest.mark.parametrize("action", ON_GPU)
def test_a_fault_of_a_gpu_needs_one(action: str) -> None:
    points = Points("w0", (PointFault("forward", action),), lambda index: None)
    with pytest.raises(UsageError, match="needs a GPU, and this worker sees none"):
        points("forward")


def test_what_a_users_code_raised_is_told_without_what_a_terminal_would_obey(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the journal, and in tables of others who share the cluster."""
    (told,) = explained(monkeypatch, ValueError("\x1b[31mbad\x1b[0m \x07 \udce4\n x"), device="cpu")
    assert told.error == r"ValueError: bad ? \udce4 x"
