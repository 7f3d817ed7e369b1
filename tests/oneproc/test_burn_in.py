"""What lets a device take part, and what does not; on the CPU, which computes as well."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from elastic_ft import torch_private
from elastic_ft.core.assignment import Member
from elastic_ft.core.events import ITS_OWN
from elastic_ft.errors import DeviceSick
from elastic_ft.faults import Points
from elastic_ft.worker import burn_in as module
from elastic_ft.worker.burn_in import burn_in
from elastic_ft.worker.trouble import Trouble

CPU = torch.device("cpu")


def test_a_device_that_computes_right_passes() -> None:
    burn_in(CPU, nbytes=1 << 20)


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def off_by_a_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(a, b)
        if product.dtype == torch.float32:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_a_bit)
    with pytest.raises(DeviceSick, match="cpu: 1 numbers of product 0 of matrices are wrong"):
        burn_in(CPU, nbytes=1)


@pytest.mark.parametrize("read", [0x57, 0x51])
def test_memory_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    def forgetful(block: torch.Tensor, value: int) -> torch.Tensor:
        block.copy_(torch.full_like(block, value))
        block[-1] = read  # one bit is wrong
        return block

    monkeypatch.setattr(torch.Tensor, "fill_", forgetful)
    expected = f"cpu: of 2500 bytes written as 0x55 some are read as {read:#x}"
    with pytest.raises(DeviceSick, match=expected):
        burn_in(CPU, nbytes=2500)


class Made(torch_private.TorchDispatchMode):
    """Adds up the bytes of all tensors that are made meanwhile."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(one) for one in tree_leaves(args)}
        new = [one for one in tree_leaves(made) if id(one) not in given]
        self.nbytes += sum(one.nbytes for one in new if isinstance(one, torch.Tensor))
        return made


def test_a_block_is_all_the_memory_that_it_takes() -> None:
    """Workers that share a device try at once; others train on it meanwhile."""
    with Made() as made:
        module._check_memory(CPU, 1 << 20)
    assert 1 << 20 <= made.nbytes < (1 << 20) + 1024


@pytest.mark.parametrize(("free", "expected"), [(80 << 30, 256 << 20), (4 << 20, 1 << 20)])
def test_it_takes_one_block_or_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(module, "_check_memory", lambda device, nbytes: tried.append(nbytes))
    burn_in(CPU)
    assert tried == [expected]


@pytest.mark.parametrize("check", ["_check_products", "_check_memory"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_no_room_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, check: str, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, check, fails)
    burn_in(CPU, nbytes=1)


def test_a_device_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(module, "_check_products", lambda device: ended.wait(30))
    with pytest.raises(DeviceSick, match=r"has not ended its burn-in in 0\.05 s"):
        burn_in(CPU, nbytes=1, deadline_s=0.05)
    ended.set()


def test_an_error_of_the_device_is_one_line_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(module, "_check_products", fails)
    with pytest.raises(DeviceSick, match="cpu: CUDA error: uncorrectable ECC"):
        burn_in(CPU, nbytes=1)


def test_no_kind_of_error_is_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise AssertionError("no driver")

    monkeypatch.setattr(module, "_check_products", fails)
    with pytest.raises(DeviceSick, match="no driver"):
        burn_in(CPU, nbytes=1)


def test_it_is_that_workers_own_trouble() -> None:
    """The job goes on without it; its node is avoided once it happens again and again."""
    told: list[object] = []
    points = Points("w0", (), lambda index: None)
    trouble = Trouble(Member("w0", "n0", "localhost", 0), points, told.append, lambda s: False)
    trouble.user_raised(DeviceSick("cuda:0: 3 numbers are wrong"))
    (event,) = told
    assert (event.whose, event.usage, event.node) == (ITS_OWN, True, "n0")  # type: ignore[attr-defined]


def test_a_device_that_fails_for_good_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later call of CUDA fails, too: the one that frees what was tried is no error."""

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module, "_check_memory", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    with pytest.raises(DeviceSick, match="cpu: CUDA error: an illegal memory access"):
        burn_in(CPU, nbytes=1)
