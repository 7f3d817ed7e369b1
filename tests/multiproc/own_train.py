"""A training loop of one's own, as a user would write it, that tells what it saw.

Arguments: a folder for what it tells, where a file "gate" holds it back; steps; a seed; "stream",
or "processes".
"""

import json
import os
import sys
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import elastic_ft
from tests.multiproc import tiny

OUT, STEPS, SEED = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
IS_STREAM, READERS = sys.argv[4:] == ["stream"], 2 * (sys.argv[4:] == ["processes"])
DIM, VOCABULARY = 16, 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, DIM))
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCABULARY)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if (
            self.training and torch.is_grad_enabled()
        ):  # equal on all ranks, as they are dealt unevenly
            self.seen.fill_(self.head.bias.detach().double().sum())
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(index))


class Stream(torch.utils.data.IterableDataset):
    """As many pass by in another order each time, drawn from the global generator."""

    def __init__(self, samples: tiny.Gated) -> None:
        self.samples = samples

    def __iter__(self):
        yield from (self.samples[index] for index in torch.randperm(len(self.samples)).tolist())


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Of FSDP2's, all ranks' parts: a collective."""
    full = getattr(parameter, "full_tensor", None)
    return (full() if full is not None else parameter).detach()


class Average:
    """An exponential moving average of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.values[name].lerp_(whole(parameter), 0.1)

    def state_dict(self) -> dict:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for name, value in state["values"].items():
            self.values[name].copy_(value)


class History:
    """What a loop collects between steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict:
        return {"losses": self.losses[-5:]}

    def load_state_dict(self, state: dict) -> None:
        self.losses = list(state["losses"])


ctx = elastic_ft.init(seed=3)
torch.manual_seed(SEED)
model = Model()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-2, "weight_decay": 0.0}],
    lr=3e-2,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
samples = tiny.Gated(Samples(), OUT / "gate")
loader = torch.utils.data.DataLoader(
    Stream(samples) if IS_STREAM else samples, batch_size=2, num_workers=READERS
)
model, optimizer, scheduler, loader = ctx.prepare(model, optimizer, scheduler, loader)
ema, history = Average(model), History()
ctx.register(ema=ema, history=history)

if ctx.job.parallel.strategy == "ddp":  # who joins evaluates by itself
    ctx.evaluate(lambda micro: (float(micro.sum()), len(micro)), [Samples()[n] for n in range(5)])

told = (OUT / f"{os.getpid()}.jsonl").open("a")


def tell_readers() -> None:
    with (OUT / f"{os.getpid()}.readers").open("a") as file:
        print(*(process.pid for process in psutil.Process().children()), file=file)


tell_readers()
bodies = 0


@ctx.step
def train_step(batch):
    global bodies
    bodies += 1
    for micro in batch:
        logits = model(micro[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten(), reduction="sum")
        sure = logits.softmax(-1).amax(-1).sum()
        ctx.backward(loss, micro[:, 1:].numel(), {"sure": (sure, micro[:, 1:].numel())})
    ctx.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    ema.update()
    return float(sum(whole(p).double().sum() for p in model.parameters()))


for batch in loader:
    total = train_step(batch)
    result = ctx.latest
    history.losses.append(result.loss)
    line = {
        "step": result.number,
        "loss": result.loss,
        "norm": result.grad_norm,
        "sure": result.metrics["sure"],
        "rank": result.rank,
        "world": result.world_size,
        "updates": ema.updates,
        "history": history.losses[-5:],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "ema": float(sum(v.double().sum() for v in ema.values.values())),
        "seen": float(model.seen),
        "parameters": total,
    }
    told.write(json.dumps(line) + "\n")
    told.flush()
    ctx.log(own=result.number * 2)
    if result.number == STEPS:
        break
tell_readers()
told.write(json.dumps({"bodies": bodies, "after": True}) + "\n")
told.flush()
