"""Two loops over epochs, one after the other, each with a body of its own.

Arguments: a folder for what it tells.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft
from tests.multiproc import tiny

OUT = Path(sys.argv[1])
STEPS = 4  # of an epoch

ctx = elastic_ft.init(seed=3)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = tiny.Gated(TensorDataset(torch.randn(70, 8)), OUT / "gate")
model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(samples, batch_size=2))


@ctx.step
def train_step(batch, phase):
    with (OUT / f"{os.getpid()}.jsonl").open("a") as told:
        told.write(json.dumps({"step": batch.number, "phase": phase}) + "\n")
    for (x,) in batch:
        ctx.backward(F.mse_loss(model(x), torch.full((len(x), 4), float(phase))))
    optimizer.step()
    optimizer.zero_grad()


for phase, span in enumerate([(1,), (1, 3)]):
    for _ in ctx.epochs(*span, steps=STEPS):
        for batch in loader:
            train_step(batch, phase)
