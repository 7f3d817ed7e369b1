"""A loop of one's own with the mistakes that people make, each of which it prints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import elastic_ft

ctx = elastic_ft.init(steps=4, batch={"global_batch_size": 8, "micro_batch_size": 2})
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = TensorDataset(torch.ones(64, 2))


def wrong(make: Callable[[], Any]) -> None:
    try:
        make()
    except elastic_ft.UsageError as error:
        print(error)
    else:
        print("no error")


sampler = WeightedRandomSampler([1.0] * 64, 8)
wrong(lambda: ctx.prepare(model, optimizer, DataLoader(samples, batch_size=2, sampler=sampler)))
wrong(lambda: ctx.prepare(model, optimizer, DataLoader(samples, batch_size=4)))
for option in (
    {"timeout": 5.0, "num_workers": 1},
    {"worker_init_fn": print, "num_workers": 1},
    {"shuffle": True, "generator": torch.Generator()},
    {"sampler": RandomSampler(samples, replacement=True)},
):
    loader = DataLoader(samples, **{"batch_size": 2} | option)
    wrong(lambda: ctx.prepare(model, optimizer, loader))  # noqa: B023
wrong(lambda: ctx.log(a=1))
wrong(elastic_ft.init)
reading = {"num_workers": 2, "persistent_workers": True, "pin_memory": True}
with warnings.catch_warnings(record=True) as warned:
    loader = DataLoader(samples, batch_size=2, **reading)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
print(*(line.message for line in warned if line.category is UserWarning), sep="\n")
print("steps of a pass:", len(loader))


@ctx.step
def train_step(batch: Any) -> None:
    for (x,) in batch:
        ctx.backward(model(x).sum(), 2)
    optimizer.step()
    optimizer.zero_grad()


@ctx.step
def evaluating_step(batch: Any) -> None:
    wrong(lambda: ctx.evaluate(lambda micro: (0.0, 1), samples))
    wrong(lambda: ctx.gathered(model))
    for (x,) in batch:
        ctx.backward(model(x).sum(), 2)
    optimizer.step()
    optimizer.zero_grad()


batches = iter(loader)
first = next(batches)
train_step(first)
wrong(optimizer.step)
second = next(batches)
wrong(lambda: second[0])
try:
    second.to("cpu")
except AttributeError as error:
    print(error)
wrong(lambda: train_step(first))
wrong(lambda: next(batches))
evaluating_step(second)
third = next(iter(loader))
ctx.log(held_out=ctx.evaluate(lambda micro: (3.0, 2), DataLoader(samples)))
ctx.log(after=True)
train_step(third)
for _ in loader:  # the fourth
    with ctx.attempt() as attempt:
        wrong(lambda: ctx.evaluate(lambda micro: (0.0, 1), samples))
        wrong(lambda: ctx.attempt().__enter__())
        for (x,) in attempt.batch:
            ctx.backward(model(x).sum(), 2)
        optimizer.step()
    print("attempted:", attempt.step.number)
    wrong(lambda: ctx.attempt().__enter__())
wrong(lambda: list(loader))
