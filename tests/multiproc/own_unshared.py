"""A loop whose loss depends on what ranks do not share.

Arguments: a folder for what it tells; "carried": the step's function goes on from what the
micro-batch before has left; "kept": it reads what the loop has collected between steps, which
nobody has registered; "indexed": it looks a step's number up there, which who joins has not. And
"summed": one that is made of what they share, with a collective for each micro-batch. "gathered":
the features of all ranks are in it, as in contrastive losses. "nan": as "kept", and no loss of who
joins is a number. "counted": the rate is made of a count of the script's own; "averaged": what is
registered is.
"""

import copy
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft
from tests.multiproc import tiny

OUT, WHAT = Path(sys.argv[1]), sys.argv[2]
STEPS = 12

ctx = elastic_ft.init(seed=3)
cell = torch.nn.GRUCell(8, 8)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
x = torch.randn(96, 8)
samples = tiny.Gated(TensorDataset(x, x.flip(1)), OUT / "gate")
cell, optimizer, loader = ctx.prepare(cell, optimizer, DataLoader(samples, batch_size=2))
average = copy.deepcopy(cell)
if WHAT == "averaged":
    ctx.register(average=average)
made = 0
hidden = torch.zeros(2, 8)
collected = [1.0]
by_step = {0: 1.0}


@ctx.step
def train_step(batch):
    global hidden, made
    if WHAT == "counted":
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + made)
    for a, b in batch:
        if WHAT == "indexed":
            hidden = a * by_step[batch.number - 1]
        elif WHAT == "kept":
            hidden = a * (sum(collected) / len(collected))
        elif WHAT in ("summed", "counted", "averaged"):
            hidden = a
        if WHAT == "summed":
            dist.all_reduce(a.sum().clone())
        if WHAT == "nan":
            hidden = a * (1.0 if len(collected) == batch.number else math.nan)
        elif WHAT == "gathered":
            everyones = [torch.zeros_like(a) for _ in range(ctx.world_size)]
            dist.all_gather(everyones, a)
            hidden = a + torch.stack(everyones).mean(0)
        hidden = cell(a, hidden)
        ctx.backward(F.mse_loss(hidden, b))
        hidden = hidden.detach()
    optimizer.step()
    optimizer.zero_grad()
    made += 1
    cut = WHAT == "counted"
    for kept, now in () if cut else zip(average.parameters(), cell.parameters(), strict=True):
        kept.data.lerp_(now.data, 1 / made if WHAT == "averaged" else 0.1)


for batch in loader:
    step = train_step(batch)
    collected.append(1 / step.number)
    by_step[step.number] = 1 / step.number
    with (OUT / f"{os.getpid()}.jsonl").open("a") as told:
        told.write(json.dumps({"step": step.number, "loss": step.loss}) + "\n")
    if step.number == STEPS:
        break
