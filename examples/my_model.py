"""A model and a dataset of your own: what `examples/custom.yaml` names.

The task: tell the next value of a noisy sine wave from the last `window` values.

Two rules make it elastic. `dataset[i]` depends on `i` alone, so that any worker can read any
sample. The model returns a sum and a count, not a mean, so that workers with different numbers of
samples can be added up correctly.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss


class Waves:
    """`count` pieces of sine waves; piece `i` is made from (seed, i) when it is asked for."""

    def __init__(self, count: int, window: int, seed: int) -> None:
        self.count, self.window, self.seed = count, window, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        phase, frequency = torch.rand(2, generator=generator)
        times = torch.arange(self.window + 1) * (0.05 + 0.3 * frequency)
        noise = 0.05 * torch.randn(self.window + 1, generator=generator)
        wave = torch.sin(times + 2 * math.pi * phase) + noise
        return {"history": wave[:-1], "target": wave[-1]}


def waves(count: int, window: int, seed: int) -> tuple[Waves, Waves]:
    """Training and held-out data. `seed` is the job's, unless the job's kwargs give one."""
    return Waves(count, window, seed), Waves(count // 20, window, seed + 1)


class Forecaster(nn.Module):
    """A residual network over the window. The dataset's keys are `forward`'s arguments."""

    def __init__(self, window: int, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.inwards = nn.Linear(window, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.outwards = nn.Linear(width, 1)

    def forward(self, history: Tensor, target: Tensor) -> tuple[Tensor, int, dict]:
        """Returns (sum of squared errors, number of them, others by name) for [B, window], [B]."""
        x = self.inwards(history)
        for block in self.blocks:
            x = block(x)
        forecast = self.outwards(x).squeeze(-1)
        close = (forecast - target).abs() < 0.1
        metrics = {"close": (close.sum(), target.numel())}  # sum and count, as of the loss
        return mse_loss(forecast, target, reduction="sum"), target.numel(), metrics


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))
