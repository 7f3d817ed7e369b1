"""Clears gradients at the body's top by hand: those of earlier micro-batches would be lost."""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

ctx = elastic_ft.init(
    name="cleared",
    steps=2,
    batch={"global_batch_size": 8, "micro_batch_size": 4},
    parallel={"strategy": sys.argv[1]},
)
model = torch.nn.Sequential(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 3), torch.zeros(32).long()), batch_size=4)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)


@ctx.each(loader)
def train_step(x, y):
    for parameter in model.parameters():
        parameter.grad = None
    ctx.backward(F.cross_entropy(model(x), y))
    optimizer.step()
