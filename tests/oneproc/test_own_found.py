"""What a script need not say: losses, schedulers and scalers that are its job's anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from elastic_ft.engines.own_scales import Scales
from elastic_ft.errors import ConfigError
from elastic_ft.training.batch import Batch
from elastic_ft.training.context import Context
from elastic_ft.training.each import MicroTurns
from elastic_ft.training.found import found_for, watch
from elastic_ft.worker.steering import Dealt, Steering
from tests.oneproc.own_loops import Own
from tests.oneproc.test_own_arguments import context, samples

Tell = Callable[[Context, torch.Tensor, torch.amp.GradScaler], None]


@pytest.fixture
def ctx() -> Iterator[Context]:
    made = context()
    watch(lambda: made)
    yield made
    watch(lambda: None)


def test_schedulers_of_a_prepared_optimizer_are_kept(ctx: Context) -> None:
    """Fabric's are given to nobody; who joined had another rate, and was refused."""
    models = [nn.Linear(1, 1) for _ in range(3)]
    first, second, other = (SGD(model.parameters()) for model in models)
    given = StepLR(first, 1)
    ctx.prepare(models[0], first, given, samples())
    ctx.prepare(models[1], second)
    step, plateau = StepLR(first, 2), ReduceLROnPlateau(second)
    parts: list[Any] = [ConstantLR(first), LinearLR(first)]
    whole, elsewhere = SequentialLR(first, parts, [3]), StepLR(other, 1)
    scaler = torch.amp.GradScaler("cpu")
    ctx._begin()
    assert ctx._own is not None
    kept = ctx._own.engine.own
    assert kept.names == ["prepared2", "found1", "found2", "found5", "found7"]
    assert kept.things == [given, step, plateau, whole, scaler] and elsewhere not in kept.things
    late = StepLR(first, 3)
    assert list(found_for([first], [])) == [] and late not in kept.things
    with pytest.raises(ConfigError, match=r"ctx.prepare: comes after the first batch"):
        ctx.prepare(elsewhere)


def test_nothing_begins_without_a_model_or_an_optimizer(ctx: Context) -> None:
    ctx.setup_dataloaders(samples())
    with pytest.raises(ConfigError, match=r"at least one nn.Module, found none"):
        ctx._begin()
    ctx.setup_module(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="at least one optimizer, found none"):
        ctx._begin()


def by_context(ctx: Context, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    ctx.backward(loss)


def plainly(ctx: Context, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    loss.backward()


def by_context_scaled(ctx: Context, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    ctx.backward(loss, scaler=scaler)


def scaled(ctx: Context, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(loss).backward()


def trained(ctx: Context, tell: Tell) -> tuple[Any, float, float]:
    """The gradient before the optimizer, a step's loss, and a weight after it."""
    is_scaled = tell in (scaled, by_context_scaled)
    own, scaler = Own("ddp"), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    ctx._own, gradients = Steering(own.engine, None), []  # type: ignore[arg-type]
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6) + 3])
        batch = Batch(own.engine, Dealt(running, 1, 0, 1))
        ctx._inside, ctx._turn = True, MicroTurns(batch, own.engine)

        def body(tokens: torch.Tensor) -> None:
            tell(ctx, F.cross_entropy(own.model(tokens), tokens.flip(0)), scaler)
            weight = own.model.embedding.weight
            assert weight.grad is not None
            gradients.append(weight.grad.clone())
            scaler.step(own.optimizer)
            scaler.update()

        loss, begun = 0.0, running.agree
        running.agree = lambda total, *more: (seen.append(float(total)), begun(total, *more))[1]
        seen: list[float] = []
        ctx._turn.run(body)
        ctx._inside, (loss,) = False, seen
        own.engine.end_attempt()
        return gradients, loss, float(own.model.embedding.weight.sum())


@pytest.mark.parametrize(("said", "written"), [(by_context, plainly), (by_context_scaled, scaled)])
def test_a_plain_backward_in_each_tells_the_loss(ctx: Context, said: Tell, written: Tell) -> None:
    """The function went on with the first micro-batch's, and the step was refused."""
    (wanted, loss, weight), found = trained(ctx, said), trained(ctx, written)
    assert len(found[0]) == len(wanted) == 1
    assert torch.equal(found[0][0], wanted[0]) and found[1:] == (loss, weight)


def test_a_second_plain_backward_in_each_is_refused(ctx: Context) -> None:
    """Of what is no loss, say: an adversary's gradient by the input."""

    def twice(ctx: Context, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
        loss.backward()
        (loss.detach() * torch.ones(1, requires_grad=True)).backward()

    with pytest.raises(ConfigError, match=r"or loss.backward\(\), came twice for a micro-batch"):
        trained(ctx, twice)


def test_a_plain_backward_elsewhere_is_torchs(ctx: Context) -> None:
    """Outside the step's function, in another's, and where it says more than a loss."""
    weight = torch.ones(1, requires_grad=True)
    (2 * weight).backward()
    ctx._inside, ctx._turn = True, SimpleNamespace(takes_losses=False)  # type: ignore[assignment]
    (2 * weight).backward()
    ctx._turn = SimpleNamespace(takes_losses=True)  # type: ignore[assignment]
    (2 * weight).backward(torch.ones(1))
    assert weight.grad is not None and float(weight.grad) == 6.0


best = 9.0  # a variable of this module, as is the scheduler that stands beside it in a script
beside: Any = None


def test_a_variable_hides_nothing_that_stands_beside_it(ctx: Context) -> None:
    """All of its module was taken for kept: who joined had another rate, and was refused."""
    global beside
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    beside = StepLR(optimizer, 1)
    ctx.prepare(model, optimizer, samples(), "best")
    ctx._begin()
    assert ctx._own is not None and beside in ctx._own.engine.own.things
    beside = None


def test_a_scaler_that_is_off_is_put_back_as_any() -> None:
    """nanoGPT's, in fp32: after a lost worker each attempt raised an AttributeError."""
    scales, scaler = Scales([]), torch.amp.GradScaler("cpu", enabled=False)
    scales.begin()
    scales.use(scaler)
    scales.put_back([scaler])
    assert not scaler.state_dict()
