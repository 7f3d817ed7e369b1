"""A script as others write them: a class, epochs, a scheduler that moves once an epoch."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft
from tests.multiproc import tiny

OUT, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])


class Trainer:
    def __init__(self, ctx, model, loader, optimizer, scheduler):
        self.ctx, self.model, self.loader = ctx, model, loader
        self.optimizer, self.scheduler = optimizer, scheduler
        self.run_batch = ctx.step(self.run_batch)
        self.told = (OUT / f"{os.getpid()}.jsonl").open("a")

    def run_batch(self, batch):
        for x, y in batch:
            self.ctx.backward(F.mse_loss(self.model(x), y))
            torch.linalg.svd(torch.ones(300, 300))  # as a model's work: a test's gate is not faster
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        finished = 0
        self.ctx.prepare("finished")
        for epoch in self.ctx.epochs(EPOCHS):
            steps = [self.run_batch(batch).number for batch in self.loader]
            self.scheduler.step()
            finished += 1  # noqa: SIM113
            rate = self.scheduler.get_last_lr()[0]
            self.tell(epoch=epoch, steps=steps, rate=rate, finished=finished)
        self.tell(after=True)

    def tell(self, **values):
        self.told.write(json.dumps(values) + "\n")
        self.told.flush()


ctx = elastic_ft.init(seed=3)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(70, 8)
samples = tiny.Gated(TensorDataset(x, x.sum(1, keepdim=True)), OUT / "gate")
loader = DataLoader(samples, batch_size=2)
loader = ctx.setup_dataloaders(loader)
model, optimizer = ctx.setup(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # is found
Trainer(ctx, model, loader, optimizer, scheduler).train()
