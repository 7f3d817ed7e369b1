"""A class with ``fit``: samples as dicts, a scaler, running statistics, a rate that follows the
held-out loss, weights saved by rank 0."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic_ft


class Points(Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": (self.x[index].sum() > 0).long()}


class Fit:
    def __init__(self, ctx, optimizer, model):
        self.ctx, self.held_out = ctx, Points(100)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loader = DataLoader(Points(320), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, *_ = ctx.prepare(
            model, optimizer, loader, self.scheduler, self.scaler
        )

    def training_step(self, batch):
        batch = {name: value.to(self.ctx.device) for name, value in batch.items()}
        self.optimizer.zero_grad()
        self.ctx.backward(F.cross_entropy(self.model(batch["x"]), batch["y"]), scaler=self.scaler)
        self.scaler.unscale_(self.optimizer)
        self.ctx.clip_grad_norm_(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def loss(self, batch):
        logits = self.model(batch["x"])
        return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])

    def fit(self, epochs):
        for epoch in self.ctx.epochs(epochs):
            self.loader.sampler.set_epoch(epoch)
            self.model.train()
            self.ctx.each(self.loader)(self.training_step)
            self.model.eval()
            self.scheduler.step(float(self.ctx.evaluate(self.loss, self.held_out)))
            if self.ctx.rank == 0:
                torch.save(self.model.state_dict(), "last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    ctx = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    Fit(ctx, optimizer, model).fit(parser.parse_args().epochs)
