"""A script of the form that Accelerate gives them, and what each of its calls is here.

    elastic-ft launch --processes --workers 3 examples/own_accelerate.py
    python examples/own_accelerate.py    # alone: the same loop, a world of one

The comments say what the line was with Accelerate. Accelerate itself is not needed.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_ft

EPOCHS = 3

# accelerator = Accelerator(gradient_accumulation_steps=...); set_seed(42)
ctx = elastic_ft.init(
    name="own-accelerate", seed=42, batch={"global_batch_size": 32, "micro_batch_size": 4}
)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, input_ids):
        return self.layers(self.words(input_ids).mean(1))


def sentences(count, seed):
    ids = torch.randint(50, (count, 12), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids, (ids.float().mean(1) > 24.5).long())


class Collate:
    def __call__(self, samples):
        ids, labels = zip(*samples, strict=True)
        return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


class BestSoFar:
    """Was given to accelerator.register_for_checkpointing."""

    def __init__(self) -> None:
        self.accuracy = 0.0

    def state_dict(self):
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state):
        self.accuracy = state["accuracy"]


torch.manual_seed(42)  # of the model's own initial weights
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
train_loader = DataLoader(sentences(320, seed=0), batch_size=4, collate_fn=Collate())
eval_loader = DataLoader(sentences(64, seed=1), batch_size=4, collate_fn=Collate())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=30)

# model, optimizer, train_loader, scheduler = accelerator.prepare(...)
model, optimizer, train_loader, scheduler = ctx.prepare(model, optimizer, train_loader, scheduler)
best = BestSoFar()
ctx.register(best=best)  # accelerator.register_for_checkpointing(best)


@ctx.step
def train_step(batch):
    for micro in batch:  # with accelerator.accumulate(model):
        logits = model(micro["input_ids"])
        right = (logits.argmax(1) == micro["labels"]).sum()
        count = len(micro["labels"])
        # accelerator.backward(loss); accelerator.gather_for_metrics((predictions, labels))
        loss = F.cross_entropy(logits, micro["labels"], reduction="sum")
        ctx.backward(loss, count, {"accuracy": (right, count)})
    ctx.clip_grad_norm_(1.0)  # accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()  # once a step: not once for each process
    optimizer.zero_grad()


def right_and_count(micro):
    found = model(micro["input_ids"]).argmax(1) == micro["labels"]
    return found.sum(), len(found)


for epoch in ctx.epochs(EPOCHS):  # range(EPOCHS)
    for batch in train_loader:
        train_step(batch)
        ctx.log(rate=scheduler.get_last_lr()[0])  # accelerator.log({...}, step)
    # model.eval(), torch.no_grad(), accelerator.gather_for_metrics: ctx.evaluate does all three
    accuracy = ctx.evaluate(right_and_count, eval_loader, name="accuracy")
    best.accuracy = max(best.accuracy, float(accuracy))
    if ctx.rank == 0:  # accelerator.is_main_process, accelerator.print
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, best {best.accuracy:.3f}")

# accelerator.unwrap_model(model).save_pretrained(...), accelerator.wait_for_everyone()
ctx.export(model, "runs/own-accelerate-weights")
