"""Whether a device computes what it should, before its worker takes part.

Who joins with a sick GPU costs all the others a generation; who never joins costs them nothing.
"""

from __future__ import annotations

import threading

import torch

from elastic_ft.errors import DeviceSick
from elastic_ft.worker.devices import is_out_of_memory

DEADLINE_S = 60.0
SIZE, PRODUCTS, LARGEST = 1024, 16, 8  # whole numbers: exact in float32 and TF32 alike
BLOCK_BYTES = 256 << 20  # more than any cache of a GPU has
SHARE = 0.25  # of what is free, at most: others on the device need memory meanwhile
PATTERNS = (0x55, 0xAA)


def burn_in(
    device: torch.device, nbytes: int | None = None, deadline_s: float = DEADLINE_S
) -> None:
    """Products of matrices as the CPU has them, and memory that keeps what is written to it.

    ``nbytes``: of its memory, in one block; by default BLOCK_BYTES.
    Raises DeviceSick, also if the device has not answered within ``deadline_s``. Where others have
    taken its memory, no more is tried: that says nothing about the device.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _check_products(device)
            _check_memory(device, _default_bytes(device) if nbytes is None else nbytes)
        except Exception as error:  # of many kinds: none is a pass
            if not is_out_of_memory(error):
                failed.append(error)

    thread = threading.Thread(target=run, name="burn-in", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():  # nothing can break a kernel off: this process ends with it
        raise DeviceSick(f"{device} has not ended its burn-in in {deadline_s:g} s")
    for error in failed:
        if isinstance(error, DeviceSick):
            raise error
        raise DeviceSick(f"{device}: {error}") from error
    torch.cuda.empty_cache()  # what was tried is the job's


def _check_products(device: torch.device) -> None:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-LARGEST, LARGEST + 1, (SIZE, SIZE), generator=random) for _ in range(2))
    expected = (a.double() @ b.double()).float()
    there_a, there_b = a.float().to(device), b.float().to(device)
    for number in range(PRODUCTS):
        found = (there_a @ there_b).cpu()
        if wrong := int((found != expected).sum()):
            raise DeviceSick(f"{device}: {wrong} numbers of product {number} of matrices are wrong")


def _check_memory(device: torch.device, nbytes: int) -> None:
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for pattern in PATTERNS:
        block.fill_(pattern)
        for found in map(int, torch.aminmax(block)):  # without a copy: a comparison makes one
            if found != pattern:
                wrong = f"written as {pattern:#x} some are read as {found:#x}"
                raise DeviceSick(f"{device}: of {nbytes} bytes {wrong}")


def _default_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return min(BLOCK_BYTES, int(free * SHARE))
