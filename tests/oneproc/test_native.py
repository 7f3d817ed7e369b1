"""What steps of the native engine leave behind, and what they must not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.modules import FirstGradients
from tests.oneproc.alone import attached, job_of, reach, run_step


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
        return {name: buffer.clone() for name, buffer in engine._model.buffers.items()}


def test_padding_is_in_no_running_statistics() -> None:
    found, expected = buffers_after(1.0, 0.0, 0.0), buffers_after(1.0)
    assert found["norm.running_mean"].any()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_hook_on_what_no_gradient_reaches_is_removed() -> None:
    """The last block's input has none where all before it is frozen."""
    block, first_gradients = nn.Linear(2, 2), FirstGradients()
    for _ in range(3):
        first_gradients.watch(reach, [block])
        block(torch.ones(2))
    assert len(block._forward_pre_hooks) == 1


def test_the_first_gradients_are_announced_once_a_step() -> None:
    block, first_gradients = nn.Linear(2, 2), FirstGradients()
    reached: list[str] = []
    for parameter in (None, block.weight):
        first_gradients.watch(reached.append, [block], parameter)
        for _ in range(2):  # micro-batches
            block(torch.ones(2, requires_grad=True)).sum().backward()
    assert reached == ["reduce"] * 2
    assert not block._forward_pre_hooks


class HalfFrozen(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.line.weight.requires_grad_(False)


def test_frozen_parameters_are_state_that_no_optimizer_keeps_anything_of() -> None:
    """They go where the model goes, checkpoints included."""
    with attached(job_of(), HalfFrozen) as engine:
        before = engine.state()["model.line.weight"].local.clone()
        run_step(engine, 1, [torch.tensor([[1.0, 2.0], [3.0, 5.0]])])
        state = engine.state()
        assert torch.equal(state["model.line.weight"].local, before)
        assert not any(name.startswith("optim.line.weight") for name in state)
        assert any(name.startswith("optim.line.bias") for name in state)
