"""A loop that ends where it likes: it is given one more batch, and then goes on with something
else until it is told to end.

Arguments: a folder, in which a file "end" tells it; after which step it ends.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft
from tests.waiting import until

END, LAST = Path(sys.argv[1]) / "end", int(sys.argv[2])

ctx = elastic_ft.init(seed=3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)


@ctx.step
def train_step(batch):
    for a, b in batch:
        ctx.backward(F.mse_loss(model(a), b))
    optimizer.step()
    optimizer.zero_grad()


made = 0
for batch in loader:
    if made == LAST:
        break
    made = train_step(batch).number
until(END.exists, "the end")
