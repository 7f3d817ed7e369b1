"""What lets a device take part, and what does not; on the CPU, which computes as well."""

from __future__ import annotations

import threading

import pytest
import torch

from elastic_ft.core.events import ITS_OWN, Member
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


def test_memory_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(block: torch.Tensor, value: int) -> torch.Tensor:
        block.copy_(torch.full_like(block, value))
        block[-1] = 0x57  # one bit is stuck
        return block

    monkeypatch.setattr(torch.Tensor, "fill_", forgetful)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 10)
    with pytest.raises(DeviceSick, match="3 of 2500 bytes have not kept what was written"):
        burn_in(CPU, nbytes=2500)


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
