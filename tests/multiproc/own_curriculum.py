"""A loop that makes its samples harder with each epoch, and changes its micro-batches each step.

Arguments: a folder, where a file "gate" holds it back; how many processes read.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import elastic_ft
from tests.multiproc import tiny

OUT, READERS = Path(sys.argv[1]), int(sys.argv[2])


class Harder(Dataset):
    def __init__(self) -> None:
        self.rows, self.level = torch.randn(64, 8), torch.zeros(())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] * (1 + self.level)


class Cut:
    def __init__(self) -> None:
        self.width = 0

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(rows)
        whole[:, self.width :] = 0
        return whole


ctx = elastic_ft.init(seed=3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
harder, cut = Harder(), Cut()
loader = DataLoader(
    tiny.Gated(harder, OUT / "gate"), batch_size=2, collate_fn=cut, num_workers=READERS
)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)


@ctx.step
def train_step(batch):
    for x in batch:
        ctx.backward(F.mse_loss(model(x), x.sum(1, keepdim=True)))
    optimizer.step()
    optimizer.zero_grad()


for epoch in ctx.epochs(3):
    harder.level = torch.tensor(float(epoch))
    for batch in loader:
        cut.width = 3 + batch.number % 5
        train_step(batch)
