"""What steps of the native engine leave behind, and what they must not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from tests.oneproc.alone import CPU, attached, job_of, reach


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.line(self.norm(x)).square().sum(), len(x)


def buffers_after(*weights: float) -> dict[str, Tensor]:
    batches = [torch.tensor([[1.0, 2.0], [3.0, 5.0]])] * len(weights)
    with attached(job_of(), Normed) as engine:
        numbered = [MicroBatch(n, x, weights[n]) for n, x in enumerate(batches)]
        engine.run_batch(1, numbered, reach)
        return {name: buffer.clone() for name, buffer in engine._buffers.items()}


def test_padding_is_in_no_running_statistics() -> None:
    found, expected = buffers_after(1.0, 0.0, 0.0), buffers_after(1.0)
    assert found["norm.running_mean"].any()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_hook_on_what_no_gradient_reaches_is_removed() -> None:
    """The last block's input has none where all before it is frozen."""
    engine = NativeEngine(job_of(), Normed, CPU, 1)
    engine._blocks = [nn.Linear(2, 2)]
    for _ in range(3):
        engine._reach_in_backward(reach)
        engine._blocks[0](torch.ones(2))
    assert len(engine._blocks[0]._forward_pre_hooks) == 1
