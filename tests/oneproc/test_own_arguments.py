"""What a script gives to its context, and says of it, in the form that other libraries have."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import elastic_ft.training.context as contexts
from elastic_ft.config import parse_job
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.training.context import Context
from elastic_ft.training.forgotten import Forgotten
from elastic_ft.training.found import watch
from elastic_ft.training.loader import Loader


def context(micro_batch_size: int = 2, workers: int = 1) -> Context:
    values = {"name": "own", "loop": {}, "parallel": {"device": "cpu"}}
    values["batch"] = {"global_batch_size": 4, "micro_batch_size": micro_batch_size}
    values["elastic"] = {"max_workers": workers}
    return Context(SimpleNamespace(job=parse_job(values)))  # type: ignore[arg-type]


def prepared(ctx: Context, *loaders: Any) -> Any:
    model = nn.Linear(1, 1)
    _, _, *found = ctx.prepare(model, torch.optim.SGD(model.parameters()), *loaders)
    return found


def samples(size: int = 2, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(list(torch.zeros(16)), batch_size=size, shuffle=shuffle)


def test_a_length_of_before_prepare_is_warned_of() -> None:
    """It counts micro-batches: a schedule made of it was as many times too long, in silence."""
    watch(lambda: None)
    loader = samples()
    assert len(loader) == 8
    with pytest.warns(UserWarning, match=r"ctx.prepare is 8 .* after it 4") as told:
        (found,) = prepared(context(), loader)
    assert told[0].filename == __file__
    assert len(found) == 4


@pytest.mark.parametrize("size", [2, 4])
def test_a_length_that_was_not_taken_or_is_the_same_is_no_mistake(size: int) -> None:
    watch(lambda: None)
    watch(lambda: None)
    loader = samples(size)
    if size == 4:  # a step is one batch
        assert len(loader) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(context(size), loader)


def test_init_watches_lengths() -> None:
    assert "watch" in contexts.init.__code__.co_names


@pytest.mark.parametrize("order", [1, -1])
def test_loaders_beside_the_one_that_shuffles_stay_as_they_are(order: int) -> None:
    train, held_out = samples(shuffle=True), samples(8)
    found = prepared(context(), *[train, held_out][::order])[::order]
    assert found[0].dataset is train.dataset and found[0] is not train
    assert found[1].loader is held_out and len(found[1]) == 2 and found[1].batch_size == 8


def test_two_loaders_that_may_both_be_trained_on_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one DataLoader .* found 2: .*shuffle=True"):
        prepared(context(), samples(shuffle=True), samples(shuffle=True))


def test_of_loaders_that_do_not_shuffle_the_first_is_trained_on() -> None:
    """As Fabric's example has them; the other is told where it is trained on, too."""
    ctx = context()
    train, held_out = ctx.setup_dataloaders(samples(), samples())
    model = nn.Linear(1, 1)
    assert ctx.setup(model, torch.optim.SGD(model.parameters()))[0] is model
    assert isinstance(train, Loader) and len(list(held_out)) == 8
    with pytest.raises(ConfigError, match=r"expected one DataLoader .* found 2"):
        ctx.setup_dataloaders(samples(shuffle=True))
    ctx._dealt = SimpleNamespace(running=SimpleNamespace(number=1))  # type: ignore[assignment]
    assert len(list(held_out)) == 8  # between the loader and the step
    batches = iter(held_out)
    next(batches)
    ctx._dealt = SimpleNamespace(running=SimpleNamespace(number=2))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"was gone over while steps are made: .* loader of both"):
        next(batches)


def test_what_accumulates_has_no_effect_in_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    ctx, model = context(workers=2), nn.Linear(1, 1)
    with ctx.accumulate(model), ctx.no_sync(model), ctx.no_backward_sync(model, enabled=True):
        assert ctx.sync_gradients is True
    ctx.print("before there is a world", end="!")
    with pytest.raises(UsageError, match="there is none before the first batch"):
        ctx.is_main_process  # noqa: B018
    ctx._place = (1, 2)
    assert not (ctx.is_main_process or ctx.is_local_main_process or ctx.is_global_zero)
    ctx.print("not here")
    ctx._place = (0, 2)
    assert ctx.is_main_process and ctx.is_local_main_process and ctx.is_global_zero
    ctx.print("here")
    assert capsys.readouterr().out == "before there is a world!here\n"


def test_what_is_refused_leaves_nothing_behind() -> None:
    """It may be given again, with another loader."""
    ctx, model = context(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"batch.micro_batch_size: the job has 2"):
        ctx.prepare(model, optimizer, samples(3))
    with pytest.raises(ConfigError, match=r"ctx.log: comes after ctx.prepare"):
        ctx.log(a=1)
    ctx.prepare(model, optimizer, samples())
    assert ctx._own is not None and ctx._own.engine.models == [model]
    with pytest.raises(ConfigError, match=r"this Linear was given before"):
        ctx.prepare(model)


class Synchronised:
    """Its state is a sum over ranks."""

    def __init__(self) -> None:
        self.count, self.made = 0, 0

    def state_dict(self) -> dict[str, Any]:
        value = torch.tensor(float(self.count))
        dist.all_reduce(value)
        self.made += 1
        return {"count": value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_state_that_is_a_collective_is_not_asked_for() -> None:
    """Who joins looks at its first step, and the others do not: it would wait for them. A loader's
    may start processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        thing, forgotten = Synchronised(), Forgotten()

        def step() -> None:
            thing.count += 1

        forgotten.begin(step, [])
        step()
        (told,) = forgotten.changed([])
        assert told.startswith("thing (Synchronised) changes from step to step") and not thing.made
        thing.state_dict()
        assert thing.made == 1
    finally:
        dist.destroy_process_group()
