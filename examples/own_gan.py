"""Two models with an optimizer each, and an average of one's weights, in one loop of one's own.

    elastic-ft launch --processes --workers 3 examples/own_gan.py
    python examples/own_gan.py           # alone: the same loop, a world of one

A generator learns a ring of points from a critic. Each step goes over its batch twice: once for the
critic, once for the generator. Where a worker is lost between the two optimizers the step before
comes back from its snapshot, so there is one of each step.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

ctx = elastic_ft.init(
    name="own-gan",
    steps=40,
    batch={"global_batch_size": 64, "micro_batch_size": 16},
    snapshot={"every_steps": 1},
)
NOISE = 4


class Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model, self.decay = model, decay
        self.values = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.values[name].lerp_(parameter, 1 - self.decay)

    def size(self) -> float:
        return float(sum(value.double().square().sum() for value in self.values.values()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


def ring(count: int) -> TensorDataset:
    angles = torch.linspace(0, 2 * torch.pi, count)
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))


def wrong(scores: torch.Tensor, are_real: bool) -> torch.Tensor:
    wanted = torch.full_like(scores, float(are_real))
    return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
loader = DataLoader(ring(4096), batch_size=16)

generator, critic, optimizer_g, optimizer_c, loader = ctx.prepare(
    generator, critic, optimizer_g, optimizer_c, loader
)
average = Average(generator)
ctx.register(average=average)


@ctx.step
def train_step(batch):
    critic.requires_grad_(True)
    for (real,) in batch:
        made = generator(torch.randn(len(real), NOISE, device=ctx.device)).detach()
        loss = wrong(critic(real), True) + wrong(critic(made), False)
        ctx.backward(loss, 2 * len(real))
    optimizer_c.step()
    optimizer_c.zero_grad()

    critic.requires_grad_(False)
    for (real,) in batch:  # again, with other draws
        made = generator(torch.randn(len(real), NOISE, device=ctx.device))
        ctx.backward(wrong(critic(made), True), len(real))
    optimizer_g.step()
    optimizer_g.zero_grad()
    average.update()


for batch in loader:
    step = train_step(batch)  # its loss is the critic's
    ctx.log(average=average.size())
    if step.number % 20 == 0 and ctx.rank == 0:
        print(f"step {step.number}: the critic's loss {step.loss:.4f}")
