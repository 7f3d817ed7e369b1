"""In the style of nanoGPT's loop: gradients accumulated by hand, a rate for each iteration."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

import elastic_ft

ctx = elastic_ft.init(steps=40, batch={"global_batch_size": 32, "micro_batch_size": 4})
max_iters, batch_size, block_size, accumulation_steps, grad_clip = 40, 4, 16, 8, 1.0
learning_rate, min_lr = 1e-2, 1e-3
for argument in sys.argv[1:]:  # its configurator: --name=value
    name, _, value = argument.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)
torch.manual_seed(0)
data = (torch.arange(20_000) ** 2 // 7) % 32


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.place = nn.Parameter(torch.zeros(block_size, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)

    def forward(self, ids, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(block_size)
        logits = self.head(self.block(self.embed(ids) + self.place, mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i : i + block_size + 1] for i in starts])


def get_lr(iteration):
    ratio = iteration / max_iters
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
ctx.prepare(model, optimizer)


@ctx.each(enumerated=True)
def train_step(iteration):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    for _ in range(accumulation_steps):
        window = get_batch()
        _, loss = model(window[:, :-1], window[:, 1:])
        loss = loss / accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
