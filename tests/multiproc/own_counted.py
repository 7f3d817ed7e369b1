"""A loop that is left by what others do not have, and goes on after it.

Arguments: a folder for what it tells; "count": after as many steps as this process has made;
"rank": rank 0 alone leaves; "evaluate": rank 0 alone evaluates; "epochs": two epochs, whose numbers
are others for who finds a snapshot; "over": two epochs, but none for who finds one.
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

OUT, WHAT = Path(sys.argv[1]), sys.argv[2]
LAST = 8

ctx = elastic_ft.init(seed=3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(70, 8)
samples = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(tiny.Gated(samples, OUT / "gate"), batch_size=2)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
told = (OUT / f"{os.getpid()}.jsonl").open("a")


def tell(**values):
    told.write(json.dumps(values) + "\n")
    told.flush()


@ctx.step
def train_step(batch):
    for a, b in batch:
        ctx.backward(F.mse_loss(model(a), b))
    optimizer.step()
    optimizer.zero_grad()


def loss(micro):
    return float(F.mse_loss(model(micro[0]), micro[1], reduction="sum")), len(micro[0])


def batches():
    if WHAT not in ("epochs", "over"):
        return loader
    first = 2 * (OUT / "snapshot").exists()
    last = 2 if WHAT == "over" else first + 2
    return (batch for _ in ctx.epochs(first, last, steps=LAST) for batch in loader)


for made, batch in enumerate(batches(), 1):
    step = train_step(batch)
    tell(step=step.number)
    (OUT / "snapshot").touch()
    if WHAT == "count" and made == LAST:
        break
    if WHAT == "rank" and ctx.rank == 0 and step.number == LAST:
        break
    if WHAT == "evaluate" and ctx.rank == 0 and step.number == LAST // 2:
        tell(mean=ctx.evaluate(loss, samples))
tell(after=True)
