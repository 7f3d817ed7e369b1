"""A loop of one's own whose script has set what torch keeps for each thread.

The default device is one that holds no values: what is made on it by whoever counts on the CPU's
shows. Argument: a folder for what it tells.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import elastic_ft


def seen(where):
    line = f"{where} {torch.get_default_device()} {torch.is_autocast_enabled('cpu')}"
    with (Path(sys.argv[1]) / str(os.getpid())).open("a") as file:
        print(line, torch.get_autocast_dtype("cpu"), torch.is_grad_enabled(), file=file)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((6,), float(index), device="cpu") / 64


ctx = elastic_ft.init()
model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
torch.set_default_device("meta")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(Samples(), batch_size=2)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)


@ctx.step
def train(batch):
    seen("step")
    for micro in batch:
        loss = F.mse_loss(model(micro).float(), micro[:, :1], reduction="sum")
        ctx.backward(loss, len(micro), {"loss": (loss.detach(), len(micro))})
    ctx.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def held_out(micro):
    seen("evaluate")
    return F.mse_loss(model(micro).float(), micro[:, :1], reduction="sum"), len(micro)


with torch.autocast("cpu", torch.float16):
    for batch in loader:
        train(batch)
    ctx.evaluate(held_out, Samples())
    with torch.no_grad():
        ctx.together(lambda progress: (seen("together"), ctx.sum(1.0)))
