"""What a script's context makes of its arguments, in this process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_ft.config import parse_job
from elastic_ft.errors import GroupBroken
from elastic_ft.training.context import Context
from elastic_ft.training.each import ZeroGrad
from elastic_ft.worker.steering import Dealt, Ended, Steering
from tests.oneproc.test_own_engine import Own

PASS = 2  # steps


def context(first: int = 1, last: int = 12) -> tuple[Context, Any]:
    """One whose worker deals those steps, and the loader."""
    values = {"name": "own", "loop": {}, "parallel": {"device": "cpu"}}
    values["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
    numbers = iter(range(first, last + 1))

    def next_item() -> Any:
        number = next(numbers, None)
        if number is None:
            return Ended("")
        return Dealt(SimpleNamespace(number=number), 1, 0, 1)  # type: ignore[arg-type]

    ctx = Context(SimpleNamespace(job=parse_job(values), next_item=next_item))  # type: ignore[arg-type]
    model = nn.Linear(1, 1)
    loader = DataLoader([0.0] * PASS * 4, batch_size=2)
    return ctx, ctx.prepare(model, torch.optim.SGD(model.parameters()), loader)[-1]


def trained(ctx: Context, loader: Any, *span: int) -> list[tuple[int, int]]:
    """Each epoch with its steps' numbers."""
    found = []
    for epoch in ctx.epochs(*span):
        for batch in loader:
            found.append((epoch, batch.number))
            ctx._dealt = None  # it is made
    return found


@pytest.mark.parametrize("first", [1, 4, 7, 10])
def test_a_second_call_of_epochs_goes_on_where_the_first_ended(first: int) -> None:
    """Also for who joins, or restarts, in the first's, between them, or in the second's."""
    ctx, loader = context(first)
    found = trained(ctx, loader, 3) + trained(ctx, loader, 3, 6)
    assert found == [(number // PASS, number + 1) for number in range(first - 1, 6 * PASS)]


def test_clipping_takes_arguments_by_name() -> None:
    own, (ctx, _) = Own("ddp"), context()
    ctx._own = Steering(own.engine, ctx._own.data)  # type: ignore[union-attr]
    parameters = [own.model.embedding.weight]
    with own.generation():
        norms = []
        for number, (norm, named) in enumerate(
            [
                ((1e-3,), {}),
                ((), {"max_norm": 1e-3}),
                ((parameters,), {"max_norm": 1e-3}),
                ((), {"parameters": parameters, "max_norm": 1e-3, "norm_type": 2.0}),
            ]
        ):
            running = own.running(number + 1, [torch.arange(6), torch.arange(6) + 3])
            for micro_batch in own.engine.micro_batches(running):
                own.backward(micro_batch)
            norms.append(ctx.clip_grad_norm_(*norm, **named))
            gradient = own.model.embedding.weight.grad
            assert gradient is not None and float(gradient.norm()) <= 1.001e-3
            own.optimizer.zero_grad()
        assert norms[0] == norms[1] > norms[2] == norms[3] > 0


def test_a_norm_of_groups_that_were_aborted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns from what was aborted: the world breaks while torch computes it, here."""
    own, (ctx, _) = Own("ddp"), context()
    ctx._own = Steering(own.engine, ctx._own.data)  # type: ignore[union-attr]
    plain = nn.utils.clip_grad_norm_

    def broken(*args: Any, **named: Any) -> torch.Tensor:
        assert own.engine._groups is not None
        own.engine._groups.abort("a worker was lost")
        return plain(*args, **named)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", broken)
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6) + 3])
        for micro_batch in own.engine.micro_batches(running):
            own.backward(micro_batch)
        with pytest.raises(GroupBroken, match="a worker was lost"):
            ctx.clip_grad_norm_(own.model.parameters(), 1.0)


def test_a_prepared_model_is_pickled_as_itself() -> None:
    """As by torch.save(model), in the step's function and outside it."""
    own = Own("ddp")
    own.model.zero_grad = ZeroGrad(own.model, lambda: True)  # type: ignore[method-assign]
    with own.generation():
        own.step(1)
        again = pickle.loads(pickle.dumps(own.model))
        assert torch.equal(again(torch.arange(6)), own.model(torch.arange(6)))
        again(torch.arange(6)).sum().backward()
        again.zero_grad()
        assert all(parameter.grad is None for parameter in again.parameters())
