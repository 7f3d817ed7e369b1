"""A training loop of one's own with much between two steps.

Arguments: a folder for what it tells; the run folder; what happens after step 3, once: "export"
takes rank 0 until the journal tells of it, and longer; "evaluation" loses rank 1.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

OUT, RUN, WHAT = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
DEADLINE_S, HEARTBEATS = 100.0, 6  # as long as another hang timeout, and half of one

ctx = elastic_ft.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 6)  # rows for each rank
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
samples = TensorDataset(torch.randn(64, 4, generator=generator))
held_out = TensorDataset(torch.randn(19, 4, generator=generator))


class Means:
    """What the loop collects between steps."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


means = Means()
model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(samples, batch_size=2))

ctx.register(means=means)


@ctx.step
def train_step(batch):
    for (x,) in batch:
        ctx.backward(model(x).square().sum(), len(x))
    optimizer.step()
    optimizer.zero_grad()


def squares(micro):
    if WHAT == "evaluation" and ctx.latest and ctx.latest.number == 3 and ctx.rank == 1:
        die()
    return model(micro[0]).square().sum(), len(micro[0])


def die():
    try:
        (OUT / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def export(progress):
    if ctx.rank == 0:
        wait_until(lambda: '"between_steps"' in (RUN / "events.jsonl").read_text())
        points = ctx.worker._points
        marks = points.count + HEARTBEATS  # it goes on
        wait_until(lambda: points.count >= marks)
    return ctx.sum(1.0)[0]


def wait_until(there):
    until_s, moment = time.monotonic() + DEADLINE_S, threading.Event()
    while not there():
        assert time.monotonic() < until_s
        moment.wait(0.05)


def tell(**line):
    with (OUT / f"{os.getpid()}.jsonl").open("a") as told:
        told.write(json.dumps(line) + "\n")


is_cut = ctx.job.parallel.strategy != "ddp"
if not is_cut:
    ctx.evaluate(squares, held_out)  # who joins later makes it by itself
for batch in loader:
    train_step(batch)
    step = ctx.latest
    if step.number == 3 and WHAT == "export":
        tell(exported_by=ctx.together(export))
    mean = ctx.evaluate(squares, held_out)
    ctx.log(mean=mean)
    means.seen.append(round(mean, 4))
    with torch.no_grad():
        alone = mean if is_cut else float(model(held_out.tensors[0]).square().sum(1).mean())
    tell(
        step=step.number,
        seen=len(means.seen),
        mean=mean,
        alone=alone,
        rank=ctx.rank,
        world=ctx.world_size,
    )
