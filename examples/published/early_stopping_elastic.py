"""In the style of early stopping by hand: the best value so far, and patience."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

ctx = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})

torch.manual_seed(0)
inputs = torch.randn(384, 10)
targets = inputs @ torch.randn(10, 1) + 0.5 * torch.randn(384, 1)
loader = DataLoader(TensorDataset(inputs[:320], targets[:320]), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[320:], targets[320:]), batch_size=16)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, bad_epochs, patience = float("inf"), 0, 2
model, optimizer, loader = ctx.prepare(model, optimizer, loader, "best", "bad_epochs")

for epoch in ctx.epochs(40):
    model.train()

    @ctx.each(loader)
    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y) for x, y in held_out]
    held_out_loss = torch.stack(losses).mean().item()
    print(f"epoch {epoch}: held-out loss {held_out_loss:.4f}")
    scheduler.step(held_out_loss)
    if held_out_loss < best:
        best, bad_epochs = held_out_loss, 0
        best_weights = copy.deepcopy(model.state_dict())
    else:
        bad_epochs += 1
    if bad_epochs > patience:
        print(f"stopped early: best {best:.4f}")
        break
