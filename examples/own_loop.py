"""A training loop of one's own, with an average of the weights and a held-out loss.

    elastic-ft launch --processes --workers 3 examples/own_loop.py
    python examples/own_loop.py          # alone: the same loop, a world of one

It differs from a plain PyTorch loop in the lines that have `ctx` in them. Kill a worker: the others
go on in their processes, and no line below is run twice for a step.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

ctx = elastic_ft.init(
    name="own-loop",
    steps=60,
    batch={"global_batch_size": 32, "micro_batch_size": 4},
)


class Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float = 0.95) -> None:
        self.model, self.decay = model, decay
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.values[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :10].sum(1) > x[:, 10:].sum(1)).long())


def loss_and_count(micro):
    x, labels = micro
    return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)


model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.job.steps)
loader = DataLoader(samples(1024, seed=0), batch_size=4)
held_out = samples(256, seed=1)

model, optimizer, scheduler, loader = ctx.prepare(model, optimizer, scheduler, loader)
average = Average(model)
ctx.register(average=average)


@ctx.step
def train_step(batch):
    for micro in batch:  # dealt unevenly where the world is uneven
        ctx.backward(*loss_and_count(micro))
    ctx.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    average.update()


for batch in loader:
    step = train_step(batch)
    ctx.log(rate=optimizer.param_groups[0]["lr"])
    if step.number % 20 == 0:
        mean = ctx.evaluate(loss_and_count, held_out)
        if ctx.rank == 0:
            print(f"step {step.number}: loss {step.loss:.4f}, held out {mean:.4f}")

ctx.export(model, "runs/own-loop-weights")
