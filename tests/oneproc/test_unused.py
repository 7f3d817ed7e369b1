"""Parameters that a step's samples do not use: trained on, with gradients of zero."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.unused import use_all
from elastic_ft.errors import ConfigError, UsageError
from tests.oneproc.alone import attached, job_of, run_step


class Branching(nn.Module):
    """A sum of losses, of the branch that the samples ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, which: Tensor, x: Tensor) -> tuple[Tensor, int]:
        return self.branches[int(which)](x).square().sum(), len(x)


def trained(unused: bool, *branches: int) -> dict[str, Tensor]:
    optimizer = {"name": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0}
    job = job_of(optimizer=optimizer, parallel={"unused_parameters": unused})
    with attached(job, Branching) as engine:
        for step, branch in enumerate(branches, 1):
            run_step(engine, step, [(torch.tensor(branch), torch.ones(1, 2))] * 2)
        return {name: p.detach().clone() for name, p in engine._model.parameters.items()}


def test_ddp_goes_on_past_the_second_step() -> None:
    found, start = trained(True, 0, 1, 0), trained(True)
    moved = {name for name, value in found.items() if not torch.equal(value, start[name])}
    assert moved == {f"branches.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")}


def test_without_the_key_the_first_step_says_so_and_is_not_applied() -> None:
    """DDP has reduced nothing of what shares a bucket with them, and tells in the second step."""
    with pytest.raises(UsageError, match=r"^parallel.unused_parameters: branches.1.weight and 3 "):
        trained(False, 0, 1)


def test_a_parameter_that_only_an_earlier_micro_batch_uses_is_told_of() -> None:
    """It has a gradient, which DDP has not reduced."""

    class Both(Branching):
        def forward(self, which: Tensor, x: Tensor) -> tuple[Tensor, int]:
            used = self.branches if int(which) else self.branches[:1]
            return sum(branch(x).square().sum() for branch in used), len(x)

    some, every = ((torch.tensor(which), torch.ones(1, 2)) for which in (0, 1))
    with attached(job_of(), Both) as engine:
        run_step(engine, 1, [every])
        engine.evaluate([MicroBatch(0, some)])
        run_step(engine, 2, [some, every])
        before = [p.detach().clone() for p in engine._model.parameters.values()]
        with pytest.raises(ConfigError, match="last micro-batch does not use all"):
            run_step(engine, 3, [every, some])
        assert all(map(torch.equal, before, engine._model.parameters.values())) and engine.intact
    with attached(job_of(parallel={"unused_parameters": True}), Both) as engine:
        for step in (1, 2):
            run_step(engine, step, [every, some])


def test_gradients_are_those_of_the_plain_model_and_zeros() -> None:
    torch.manual_seed(0)
    plain, model, batch = Branching(), Branching(), (torch.tensor(1), torch.randn(3, 2))
    model.load_state_dict(plain.state_dict())
    use_all(model, [])
    for each in (plain, model):
        each(*batch)[0].backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if mine.requires_grad:
            expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
            assert torch.equal(mine.grad, expected), name
    assert model.frozen.grad is None


class Output(NamedTuple):
    mask: Tensor
    logits: Tensor


OUTPUTS: dict[str, Any] = {
    "a tensor": lambda x: x,
    "a pair": lambda x: (x, 3),
    "a list with a mask before": lambda x: [torch.ones(2, dtype=torch.bool), x],
    "a named tuple": lambda x: Output(torch.ones(2, dtype=torch.bool), x),
    "a dict": lambda x: {"hidden": None, "logits": x},
}


@pytest.mark.parametrize("shape", OUTPUTS.values(), ids=OUTPUTS)
def test_whatever_a_model_returns(shape: Any) -> None:
    class Shaped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return shape(x * 2)

    model, x = Shaped(2, 2), torch.ones(2, requires_grad=True)
    use_all(model, [])
    output = model(x)
    values = output.values() if isinstance(output, dict) else output
    tensor = output if isinstance(output, Tensor) else next(v for v in values if _is_float(v))
    tensor.sum().backward()
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    with torch.no_grad():
        assert shape(x).__class__ is model(x).__class__


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
