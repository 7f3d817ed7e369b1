"""float8 by ranks that share each layer: scales, and so numbers, are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines.float8 import converting
from elastic_ft.engines.tensor_parallel import parallelize_block
from elastic_ft.models.decoder import Block, Decoder, DecoderConfig, rotations
from tests.multiproc import pool as ranks
from tests.multiproc.harness import make_job
from tests.multiproc.pool import Pool
from tests.multiproc.test_compiling import DENSE, FLOAT8, assert_losses, disturbed
from tests.oneproc.test_float8 import as_gpus_do

SIZES = DecoderConfig(50, 1, 64, 4, 2, 96, 16)
POSITIONS = 16


def block_of(kind: str, device: str) -> Block:
    precision = {"dtype": "bf16", "fp8": kind}
    job = make_job("ddp", workers=2, parallel={"tp": 2}, precision=precision)
    torch.manual_seed(0)
    decoder = converting(job, torch.device(device), lambda: Decoder(SIZES), POSITIONS)()
    converted = {n for n, m in decoder.named_modules() if type(m).__name__ == "Float8Linear"}
    assert len(converted) == 7, "all of a layer"
    block = decoder.layers[0]
    assert isinstance(block, Block)
    with torch.no_grad():  # as ranks' own largest numbers differ, so would scales of their own
        for parameter in block.parameters():
            parameter.mul_(torch.linspace(0.1, 3, parameter.numel()).view_as(parameter))
    return block


def ran(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    turns = rotations(POSITIONS, SIZES.head_dim, 10_000.0, torch.device("cpu"))
    out: torch.Tensor = block(x, turns)
    (out * torch.linspace(0.1, 3, out.shape[-1])).sum().backward()
    return out


def shared_out(
    port: int, generation: int, rank: int, world: int, kind: str, device: str
) -> list[tuple[str, float]]:
    """For ``pool.Pool``. By how much, of its size, each tensor differs from that of one process."""
    scaled = patch.object(torch, "_scaled_mm", as_gpus_do)
    capable = patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0))
    groups = ranks.form(port, generation, rank, Layout(tp=world))
    try:
        with scaled, capable:
            whole, mine = block_of(kind, device), block_of(kind, device)
            assert groups.mesh is not None
            parallelize_block(mine, groups.mesh["tp"])
            given = torch.randn(2, POSITIONS, SIZES.dim, generator=torch.Generator().manual_seed(1))
            x, own = given.clone().requires_grad_(), given.chunk(world, 1)[rank].requires_grad_()
            pairs: list[tuple[str, Any, Any]] = [
                ("out", ran(whole, x).chunk(world, 1)[rank], ran(mine, own)),
                ("input", x.grad.chunk(world, 1)[rank], own.grad),
            ]
        others = dict(mine.named_parameters())
        for name, parameter in whole.named_parameters():
            pairs.append((name, parameter.grad, others[name].grad.full_tensor()))
        return [(name, float((a - b).norm() / a.norm())) for name, a, b in pairs]
    finally:
        groups.abort("the end")
        groups.teardown()


@pytest.fixture(scope="module")
def processes() -> Any:
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_shared_layers_are_those_of_one_process(processes: Pool, kind: str, device: str) -> None:
    """A rounding that falls otherwise is a sum in another order; another scale is far more. Kernels
    for rows return bfloat16, and sums of what is rounded so are rounded to float8 once more."""
    bound = 0.1 if (kind, device) == ("rowwise", "cuda") else 1e-3
    for found in processes(shared_out, kind, device, world=2):
        assert len(found) == 11
        assert all(error < bound for _, error in found), found


@pytest.mark.timeout(600)
def test_they_lose_some_ranks_and_get_others(tmp_path: Path) -> None:
    """A killed worker takes its pair out of the world, as layers are shared by two."""
    run = disturbed(tmp_path, 4, parallel={"tp": 2, "compile": False}, **DENSE, **FLOAT8).run
    assert run.worlds() == [4, 2, 4], run.story()
    assert_losses(run, 0.003, **DENSE, **FLOAT8)
