"""In the style of Accelerate's examples: sequences classified."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_ft


class Sequences(torch.utils.data.Dataset):
    """Which half of the alphabet most of its tokens are of."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(20, (count, 8), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"ids": ids, "labels": (ids >= 10).sum() > 4}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dropout, self.head = (
            nn.Embedding(20, 16),
            nn.Dropout(0.1),
            nn.Linear(16, 2),
        )

    def forward(self, ids, labels):
        logits = self.head(self.dropout(self.embed(ids).mean(1)))
        return nn.functional.cross_entropy(logits, labels.long()), logits


def main(epochs=4):
    accelerator = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    with accelerator.main_process_first():
        sequences, held_out = Sequences(320, 0), Sequences(64, 1)
    loader = DataLoader(sequences, batch_size=4, shuffle=True)
    eval_loader = DataLoader(held_out, batch_size=16)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    for epoch in accelerator.epochs(epochs):
        model.train()

        @accelerator.each(loader)
        def train_step(batch):
            loss, _ = model(**batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss, _ = model(**batch)
            losses.append(accelerator.gather_for_metrics(loss.repeat(16)))
        loss = torch.cat(losses).mean()
        accelerator.print(f"epoch {epoch}: held-out loss {loss:.4f}")
        accelerator.log({"eval_loss": loss.item()}, step=epoch)
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "text.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
