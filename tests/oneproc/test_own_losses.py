"""A loop's body with several losses: each optimizer has those of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from elastic_ft.engines.base import MicroBatch
from elastic_ft.errors import ConfigError
from elastic_ft.training.abreast import Abreast, has_several_losses
from elastic_ft.training.batch import Batch
from elastic_ft.training.context import Context
from elastic_ft.training.found import watch
from elastic_ft.worker.steering import Dealt, Steering
from tests.oneproc.own_loops import Own
from tests.oneproc.test_own_arguments import context

BATCH = torch.linspace(-1, 1, 12).view(4, 3)
Body = Callable[[torch.Tensor], None]


class Gan:
    """As the DCGAN example has it: three losses, two optimizers, what is made is used twice."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.maker = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.critic = nn.Linear(3, 1)
        self.optimizers = [SGD(m.parameters(), lr=0.5, momentum=0.9) for m in self.models]
        self.schedulers = [StepLR(o, 1, gamma=0.5) for o in self.optimizers]
        self.tails = list[int]()

    @property
    def models(self) -> list[nn.Module]:
        return [self.critic, self.maker]

    def loss(self, given: torch.Tensor, wanted: float) -> torch.Tensor:
        scores = self.critic(given)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))

    def body(self, real: torch.Tensor) -> None:
        self.critic.zero_grad()
        self.loss(real, 1.0).backward()
        made = self.maker(real)
        self.loss(made.detach(), 0.0).backward()
        nn.utils.clip_grad_norm_(self.critic.parameters(), 0.1)
        self.optimizers[0].step()
        self.schedulers[0].step()
        self.maker.zero_grad()
        self.loss(made, 1.0).backward()
        self.optimizers[1].step()
        self.schedulers[1].step()
        self.tails.append(len(real))

    def told(self) -> list[float]:
        states = [t for m in self.models for t in m.state_dict().values()]
        rates = [o.param_groups[0]["lr"] for o in self.optimizers]
        return [*(float(t.double().pow(2).sum()) for t in states), *rates]


@pytest.fixture
def ctx() -> Iterator[Context]:
    made = context()
    watch(lambda: made)
    yield made
    watch(lambda: None)


def trained(
    ctx: Context, gan: Gan, body: Body, micros: list[torch.Tensor], padding: int = 0
) -> None:
    """For three steps."""
    own = Own("ddp", gan.models, gan.optimizers)
    ctx._own = Steering(own.engine, None)  # type: ignore[arg-type]
    for owner in (*gan.models, *gan.optimizers):
        ctx._take_zero_grad(owner)
    for number, scheduler in enumerate(gan.schedulers):
        own.engine.own.register(f"scheduler{number}", scheduler)
    with own.generation():
        for step in range(1, 4):
            running = own.running(step, micros)
            running.micro_batches[:0] = padding * [MicroBatch(0, BATCH * 5 + 1, weight=0.0)]
            ctx._turn = Abreast(Batch(own.engine, Dealt(running, 1, 0, 1)), own.engine, True)
            ctx._inside = True
            ctx._turn.run(body)
            ctx._inside = False
            own.engine.end_attempt()
            own.engine.capture()


@pytest.mark.parametrize("padding", [0, 1])
def test_a_gan_is_what_it_is_of_one_batch(ctx: Context, padding: int) -> None:
    """Two micro-batches, each the same samples: so are the means, and BatchNorm's statistics but
    for one more look at them."""
    plain, gan = Gan(), Gan()
    for part in (plain.maker[1], gan.maker[1]):
        part.momentum = 1.0  # those of the last look
    watch(lambda: None)
    for _ in range(3):
        plain.body(BATCH)
    watch(lambda: ctx)
    trained(ctx, gan, gan.body, [BATCH, BATCH], padding)
    wanted, found = plain.told(), gan.told()
    looks = plain.maker[1].num_batches_tracked
    assert gan.maker[1].num_batches_tracked == 2 * looks
    wanted[wanted.index(float(looks**2))] *= 4
    assert found == pytest.approx(wanted, rel=1e-5)
    assert gan.tails == [4, 4, 4]  # behind the last loss: once a step


@pytest.mark.parametrize("what", ["a weight", "scheduler0"])
def test_what_changes_between_losses_is_told(ctx: Context, what: str) -> None:
    """Sharpness-aware minimisation moves weights there: it would for each micro-batch."""
    gan = Gan()

    def body(real: torch.Tensor) -> None:
        gan.loss(real, 1.0).backward()
        if what == "a weight":
            with torch.no_grad():
                gan.critic.weight.add_(0.1)
        else:
            gan.schedulers[0].last_epoch += 1
        gan.loss(real, 0.0).backward()

    with pytest.raises(ConfigError, match=rf"lines between two losses changed {what}"):
        trained(ctx, gan, body, [BATCH, BATCH])


def test_a_call_that_tells_fewer_losses_is_refused(ctx: Context) -> None:
    gan = Gan()

    def body(real: torch.Tensor) -> None:
        gan.loss(real, 1.0).backward()
        if real[0, 0] < 0:
            gan.loss(real, 1.0).backward()

    with pytest.raises(ConfigError, match=r"returned without ctx\.backward"):
        trained(ctx, gan, body, [BATCH, BATCH + 2])


def test_an_error_of_any_micro_batch_is_raised(ctx: Context) -> None:
    gan = Gan()

    def body(real: torch.Tensor) -> None:
        gan.loss(real if real[0, 0] < 0 else real[:, :2], 1.0).backward()

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trained(ctx, gan, body, [BATCH, BATCH + 2])


def one(loss: Any, scaler: Any) -> None:
    if scaler:
        scaler.scale(loss).backward()
    else:
        loss.backward()


def two(loss: Any) -> None:
    loss.backward()
    one(loss, None)


def accumulated(loss: Any) -> None:
    for _ in range(3):
        loss.backward()


def looped(loss: Any, optimizer: Any) -> None:
    for _ in range(3):
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("function", "several"),
    [(one, 0), (two, 1), (looped, 1), (accumulated, 0), (Gan().body, 1), (len, 0)],
)
def test_how_many_losses_a_body_has_is_read(function: Any, several: int) -> None:
    assert has_several_losses(function) == several
