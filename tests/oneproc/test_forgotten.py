"""What a step changes and nobody has registered is told of, once; nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, SequentialLR

from elastic_ft.training.forgotten import Forgotten


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [value.clone() for value in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = self.model[0]  # of the model
        self.compiled = nn.ModuleList([self.model])  # around it
        self.teacher = copy.deepcopy(self.model).eval()
        self.target = copy.deepcopy(self.model).eval()
        self.average, self.kept = Average(self.model), Average(self.model)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.parts: list[LRScheduler] = [ConstantLR(self.optimizer), LinearLR(self.optimizer)]
        self.warmup = self.parts[0]
        self.scheduler = SequentialLR(self.optimizer, self.parts, [3])
        self.other = ConstantLR(self.optimizer)

    @property
    def known(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, self.kept]

    def step(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.teacher(x)
        self.model(x).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update()
        self.kept.update()
        self.target[0].weight.data.mul_(0.9)


def test_what_changes_and_is_not_kept_is_told_once() -> None:
    trainer, forgotten = Trainer(), Forgotten()
    forgotten.begin(trainer.step, trainer.known)
    forgotten.begin(trainer.step, trainer.known)
    assert forgotten.changed(trainer.known) == []
    trainer.step(torch.randn(3, 4))
    told = forgotten.changed(trainer.known)
    assert {line.split()[0] for line in told} == {"self.average", "self.target"}
    assert any("ctx.register(average=self.average)" in line for line in told)
    trainer.step(torch.randn(3, 4))
    trainer.other.step()
    assert [line.split()[0] for line in forgotten.changed(trainer.known)] == ["self.other"]


def test_a_function_that_is_made_anew_in_each_epoch_is_the_same() -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = ConstantLR(optimizer)
    forgotten = Forgotten()
    for epoch in range(3):

        def step() -> None:
            optimizer.step()
            scheduler.step()

        forgotten.begin(step, [model, optimizer])
        step()
        told = forgotten.changed([model, optimizer])
        assert len(told) == (epoch == 0)
    assert len(forgotten._functions) == 1


def test_names_of_a_function_inside_another_are_seen() -> None:
    model = nn.Linear(4, 4)
    average = Average(model)

    def step(x: torch.Tensor) -> None:
        model.weight.data += 1
        average.update()

    forgotten = Forgotten()
    forgotten.begin(step, [model])
    step(torch.ones(1))
    (told,) = forgotten.changed([model])
    assert told.startswith("average (Average) changes from step to step")


class Strange:
    """Raises whatever it is asked."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nobody looks at me")


def test_what_can_not_be_looked_at_ends_nothing() -> None:
    strange, trainer = Strange(), Trainer()

    def step(x: torch.Tensor) -> None:
        assert strange is not None
        trainer.step(x)

    forgotten = Forgotten()
    forgotten.begin(step, trainer.known)
    step(torch.ones(2, 4))
    forgotten.begin(step, trainer.known)
