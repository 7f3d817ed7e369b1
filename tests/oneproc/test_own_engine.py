"""A user's own module and optimizer under the engine, as the only rank."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from elastic_ft.config import parse_job
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.own import OwnEngine
from elastic_ft.engines.own_attempt import Agree, Running, check_alike
from elastic_ft.errors import ConfigError, GroupBroken, UsageError
from elastic_ft.training.given import sort_out
from tests.oneproc.alone import CPU, reach
from tests.oneproc.own_loops import Own, Tied


def plain(steps: int) -> list[float]:
    """The same in a loop without any of it."""
    torch.manual_seed(0)
    model, losses = Tied(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        total = 0.0
        for tokens in (torch.arange(6), torch.arange(6) + 3):
            loss = F.cross_entropy(model(tokens), tokens.flip(0), reduction="sum")
            (loss / 12).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 12)
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_generations_keep_every_object_and_change_no_loss(strategy: str) -> None:
    own, losses = Own(strategy), []
    with own.generation():
        kept = [id(p) for p in own.model.parameters()]
        losses += [own.step(1), own.step(2)]
    for number in (3, 5):
        with own.generation():
            assert isinstance(own.model, FSDPModule) == (strategy == "fsdp")
            assert [id(p) for p in own.model.parameters()] == kept
            trained = own.optimizer.param_groups[0]["params"]
            assert [id(p) for p in trained] == kept
            assert own.model.output.weight is own.model.embedding.weight
            losses += [own.step(number), own.step(number + 1)]
            broken = own.running(number + 2, [torch.arange(6), torch.arange(6)])
            own.backward(next(own.engine.micro_batches(broken)))  # and no more of it
    assert type(own.model) is Tied
    assert losses == pytest.approx(plain(6), rel=1e-5)


def test_what_a_step_must_not_do_is_said_in_one_line() -> None:
    own = Own("ddp")
    with own.generation():
        with pytest.raises(ConfigError, match=r"outside the function that @ctx.step decorates"):
            own.optimizer.step()
        running = own.running(1, [torch.arange(6), torch.arange(6)])
        own.backward(next(own.engine.micro_batches(running)))
        with pytest.raises(ConfigError, match="after 1 of 2 micro-batches"):
            own.optimizer.step()
        own.running(1, [torch.arange(6), torch.arange(6)])
        with pytest.raises(ConfigError, match=r"returned without optimizer.step"):
            own.engine.end_attempt()
        running = own.running(1, [torch.arange(6), torch.arange(4)])
        with pytest.raises(ConfigError, match="have 6 and 4 targets: give the sum and the count"):
            for micro_batch in own.engine.micro_batches(running):
                own.engine.backward(own.model(micro_batch.data).mean(), None)


def test_labels_that_are_left_out_are_no_targets() -> None:
    """A plain mean over them weighs micro-batches unlike."""
    images, labels = torch.ones(2, 3), torch.tensor([1, 2])
    assert check_alike((images, labels), None) == check_alike((images, labels + 1), 6) == 6
    some = torch.tensor([1, -100])
    assert check_alike((images, some), None) == check_alike({"labels": some}, 1) == 1
    with pytest.raises(ConfigError, match="have 6 and 1 targets: give the sum and the count"):
        check_alike((images, some), 6)


@pytest.mark.parametrize("with_the_first", [False, True])
def test_a_part_of_a_module_that_is_called_by_itself_is_refused(with_the_first: bool) -> None:
    """Nothing would sum its gradients over ranks, and they would train apart."""
    own = Own("ddp")
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6)])
        for micro_batch in own.engine.micro_batches(running):
            if with_the_first and running.begun == 1:
                own.backward(micro_batch)
            else:
                own.engine.backward(own.model.embedding(micro_batch.data).sum(), 6)
        with pytest.raises(ConfigError, match=r"Tied was not called .*: call the module itself"):
            own.optimizer.step()


def test_parameters_from_before_the_cut_are_refused() -> None:
    """They would be clipped, and averaged, and nothing trains them."""
    own = Own("fsdp")
    before = list(own.model.parameters())
    with own.generation():
        own.step(1)
        assert before[0] not in {*own.model.parameters()} and before[0].requires_grad
        for use in (
            lambda: torch.nn.utils.clip_grad_norm_(before, 1.0),
            lambda: before[0].detach(),
            lambda: before[0].data,
            lambda: torch.zeros(1).lerp_(before[0], 0.1),
            lambda: torch.optim.SGD(before, lr=0.1).step(),
        ):
            with pytest.raises(ConfigError, match="a parameter from before the first batch"):
                use()
        own.step(2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_clipping_what_are_no_means_yet_is_refused(strategy: str) -> None:
    own = Own(strategy)
    with own.generation():
        for number in (1, 2):
            running = own.running(number, [torch.arange(6), torch.arange(6)])
            for micro_batch in own.engine.micro_batches(running):
                own.backward(micro_batch)
            if number == 1:
                own.engine.clip_grad_norm_(math.inf)
            nn.utils.clip_grad_norm_(own.model.parameters(), 1.0)
            if number == 2:
                break
            own.optimizer.step()
            own.optimizer.zero_grad()
            own.engine.end_attempt()
        with pytest.raises(UsageError, match=r"changed before they are means: use ctx.clip_grad_"):
            own.optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("passes", [1, 2], ids=["one is left out", "two passes"])
def test_means_that_are_none_of_all_are_not_scaled_by_hand(strategy: str, passes: int) -> None:
    """They were of half the micro-batches, or of twice as many; torch counts no such change."""
    own = Own(strategy)
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6)])
        for number in range(passes):
            for micro_batch in own.engine.micro_batches(running):
                if number or running.begun > 1 or passes > 1:
                    tokens = micro_batch.data
                    loss = F.cross_entropy(own.model(tokens), tokens.flip(0))
                    own.engine.backward(loss, None)
        torch._foreach_mul_([p.grad for p in own.model.parameters()], 3.0)
        with pytest.raises(UsageError, match=r"changed before they are means: use ctx.clip_grad_"):
            own.optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_means_are_clipped_as_in_a_plain_loop_and_those_of_one_micro_batch_add_up(
    strategy: str,
) -> None:
    """As of a critic's, for what is real and what was made; then by torch's own clipping."""

    def losses(model: nn.Module, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        yield F.cross_entropy(model(tokens), tokens.flip(0))
        yield 0.5 * model(tokens).square().mean()

    batch = [torch.arange(6), torch.arange(6) + 3]
    torch.manual_seed(0)
    plain = Tied()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for tokens in batch:
            for loss in losses(plain, tokens):
                (loss / len(batch)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    model = Tied()
    own = Own(strategy, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    with own.generation():
        for number in (1, 2, 3):
            running = own.running(number, batch)
            for micro_batch in own.engine.micro_batches(running):
                for loss in losses(model, micro_batch.data):
                    own.engine.backward(loss, None)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            own.engine.optimizers[0].step()
            own.engine.optimizers[0].zero_grad()
            own.engine.end_attempt()
        found = own.engine.state()["model.embedding.weight"].local
        assert torch.allclose(found, plain.embedding.weight, rtol=1e-5)


def test_sums_and_means_in_one_step_are_refused() -> None:
    own = Own("ddp")
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6)])
        micro_batches = own.engine.micro_batches(running)
        own.engine.backward(own.model(next(micro_batches).data).mean(), None)
        with pytest.raises(ConfigError, match="count of a loss's terms always, or never"):
            own.backward(next(micro_batches))


def test_every_generator_is_seeded_by_the_place_of_a_micro_batch() -> None:
    """Whatever the function draws is the same in every world."""

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    own = Own("ddp")
    with own.generation():
        running = own.running(1, [torch.arange(6), torch.arange(6)])
        both = [drawn() for _ in own.engine.micro_batches(running)]
        running = Running(1, running.micro_batches[1:], running.agree, reach)
        own.engine.attempt(running)
        assert [drawn() for _ in own.engine.micro_batches(running)] == both[1:]
        assert both[0] != both[1]


def test_what_is_drawn_outside_micro_batches_is_the_same_on_all_ranks() -> None:
    """Each rank is dealt other micro-batches, and their seeds would stay behind."""
    found = []
    for order in (slice(0, 2), slice(0, 1), slice(1, 2)):
        own = Own("ddp")
        with own.generation():
            running = own.running(1, [torch.arange(6), torch.arange(6)])
            running.micro_batches = running.micro_batches[order]
            drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            for micro_batch in own.engine.micro_batches(running):
                own.backward(micro_batch)
            own.optimizer.step()
            own.engine.end_attempt()
            drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
            found.append(drawn)
    assert found[1:] == found[:1] * 2 and found[0][:3] != found[0][3:]


def test_two_optimizers_in_one_pass_each_have_means() -> None:
    """The second's loss comes after the first's agreement, for the same micro-batch."""
    models = [nn.Linear(3, 1) for _ in range(2)]
    own = Own("ddp", models, [torch.optim.SGD(m.parameters(), lr=1.0) for m in models])
    with own.generation():
        before = [model.bias.detach().clone() for model in models]
        running = own.running(1, [torch.ones(2, 3)])
        running.agree = lambda loss, n, squares, sums: (2 * n, squares)  # another rank's is alike
        for micro_batch in own.engine.micro_batches(running):
            for model, optimizer in zip(models, own.engine.optimizers, strict=True):
                own.engine.backward(model(micro_batch.data).mean(), None)
                optimizer.step()
                optimizer.zero_grad()
        own.engine.end_attempt()
        moved = [(b - m.bias).item() for b, m in zip(before, models, strict=True)]
        assert moved == pytest.approx([0.5, 0.5])  # this rank's half


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_optimizers_may_each_have_losses_of_their_own(strategy: str) -> None:
    """As of a generator and its critic: a backward gives gradients to one of them."""

    def make() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models = [nn.Linear(3, 3), nn.Linear(3, 1)]
        return models, [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]

    batch = [torch.ones(2, 3), torch.full((2, 3), 0.5)]
    (maker, critic), plain = make()
    for _ in range(3):
        for optimizer, sign in ((plain[1], 1.0), (plain[0], -1.0)):
            critic.requires_grad_(sign > 0)
            for x in batch:
                made = maker(x).detach() if sign > 0 else maker(x)
                (sign * critic(made).square().sum() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    models, optimizers = make()
    own = Own(strategy, models, optimizers)
    with own.generation():
        for number in (1, 2, 3):
            running = own.running(number, batch)
            for optimizer, sign in ((optimizers[1], 1.0), (optimizers[0], -1.0)):
                models[1].requires_grad_(sign > 0)
                for micro_batch in own.engine.micro_batches(running):
                    x = micro_batch.data
                    made = models[0](x).detach() if sign > 0 else models[0](x)
                    own.engine.backward(sign * models[1](made).square().sum(), 2)
                optimizer.step()
                optimizer.zero_grad()
            own.engine.end_attempt()
        for name, tensor in own.engine.state().items():
            if name in ("model.weight", "model.m1.weight"):
                wanted = (critic if "m1" in name else maker).weight
                assert torch.allclose(tensor.local, wanted, rtol=1e-5)


def test_an_optimizer_must_be_fresh_and_of_the_modules_that_are_prepared() -> None:
    job = parse_job({"name": "own", "loop": {}})
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    stray = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="parameters of no module that was prepared"):
        OwnEngine(job, [model], [stray], CPU).prepare()
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    with pytest.raises(ConfigError, match="has stepped already"):
        OwnEngine(job, [model], [stepped], CPU).prepare()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_who_begins_anew_has_the_registered_state_of_the_beginning(strategy: str) -> None:
    """A first step of which no copy was there yet when the world broke."""
    own = Own(strategy)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own.optimizer, 0.5)
    own.engine.own.register("scheduler", scheduler)
    losses = []
    for _ in range(2):
        own._state = None
        with own.generation():
            assert (scheduler.last_epoch, own.optimizer.param_groups[0]["lr"]) == (0, 0.1)
            for number in (1, 2):
                losses.append(own.step(number, scheduler))
    assert losses[2:] == losses[:2]


def test_weights_that_are_packed_are_refused_by_name() -> None:
    """A QLoRA's base, of which transformers says so or bitsandbytes' parameters do."""
    packed = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters())
    sort_out((model, optimizer))
    model[0].weight = packed(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        ConfigError, match="Sequential: quantised by bitsandbytes, which is refused"
    ):
        sort_out((model, optimizer))


def test_one_loader_is_trained_on_or_none() -> None:
    model = nn.Linear(2, 2)
    things = model, torch.optim.SGD(model.parameters())
    loaders = [DataLoader([0]) for _ in range(2)]
    assert sort_out(things).loader is None and sort_out((*things, loaders[0])).loader is loaders[0]
    assert sort_out((*things, *loaders)).loader is loaders[0]
    shuffled = [DataLoader([0], shuffle=True) for _ in range(2)]
    assert sort_out((*things, loaders[0], shuffled[0])).loader is shuffled[0]
    with pytest.raises(ConfigError, match=r"trained on, found 2: of several make one"):
        sort_out((*things, *shuffled))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_a_step_begun_in_vain_is_as_before_it(fused: bool, unscaled: bool) -> None:
    """It knows what it has unscaled until its ``update``, and leaves its scale on an optimizer that
    applies it itself (a fused one), to which the next attempt's scale is multiplied."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    own = Own("ddp", [model], [optimizer])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(agree: Agree) -> None:
        running = Running(1, [MicroBatch(0, torch.arange(6))], agree, reach)
        own.engine.attempt(running)
        for micro_batch in own.engine.micro_batches(running):
            loss = F.cross_entropy(model(micro_batch.data), micro_batch.data.flip(0))
            own.engine.backward(loss, None, scaler=scaler)
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        own.engine.end_attempt()

    def breaks(*told: object) -> tuple[int, float]:
        raise GroupBroken("somebody is gone")

    with own.generation(), pytest.raises(GroupBroken):
        before = model.output.weight.detach().clone()
        F.cross_entropy(model(torch.arange(6)), torch.arange(6).flip(0)).backward()
        assert model.output.weight.grad is not None
        expected = before - 0.1 * model.output.weight.grad
        model.zero_grad()
        step(breaks)
    with own.generation():
        step(lambda loss, terms, squares, sums: (terms, squares))
        assert torch.allclose(model.output.weight, expected, rtol=1e-6, atol=1e-7)


def test_what_is_drawn_behind_the_micro_batches_is_the_same_on_all_ranks() -> None:
    """By an optimizer that adds noise, say: each rank drew on behind its own last micro-batch, and
    their weights were others from then on."""
    own, drawn = Own("ddp"), list[float]()
    with own.generation():
        for dealt in ([0, 1], [2]):
            running = own.running(1, [torch.arange(6) + n for n in dealt])
            for micro_batch, number in zip(running.micro_batches, dealt, strict=True):
                object.__setattr__(micro_batch, "number", number)
            for micro_batch in own.engine.micro_batches(running):
                own.backward(micro_batch)
            drawn.append(float(torch.rand(())))
            own.optimizer.step()
            own.engine.end_attempt()
            drawn.append(float(torch.rand(())))
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


def test_an_optimizer_that_asks_for_a_closure_is_refused() -> None:
    """It was a TypeError of torch's, on all workers."""
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"LBFGS does not step by step\(\) alone .* @ctx.step"):
        Own("ddp", [model], [torch.optim.LBFGS(model.parameters())])
