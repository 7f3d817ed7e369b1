"""A loop over a stream: Hugging Face's, cut into virtual shards, shuffled, told what it saw.

Arguments: a folder; the kind of stream; steps.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import elastic_ft
from tests.multiproc import streams

OUT, KIND, STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def collate(samples):
    read = [sample["number"] if isinstance(sample, dict) else sample for sample in samples]
    return torch.tensor(read, dtype=torch.float32)[:, None]


ctx = elastic_ft.init(seed=3)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
stream = streams.of_kind(KIND, OUT / "gate")
if KIND == "plain":
    loader = torch.utils.data.DataLoader(stream, batch_size=2, collate_fn=collate)
else:
    loader = ctx.loader(stream, collate, shuffle_buffer=5)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
told = (OUT / f"{os.getpid()}.jsonl").open("a")


@ctx.step
def train_step(batch):
    read = []
    for micro in batch:
        read += [int(number) for number in micro]
        ctx.backward(F.mse_loss(model(micro / 1000), micro / 1000))
    optimizer.step()
    optimizer.zero_grad()
    return read


for batch in loader:
    read = train_step(batch)
    step = ctx.latest
    told.write(json.dumps({"step": step.number, "rank": step.rank, "read": read}) + "\n")
    told.flush()
    if step.number == STEPS:
        break
