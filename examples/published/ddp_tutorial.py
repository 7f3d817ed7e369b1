"""In the style of PyTorch's tutorials on DistributedDataParallel: a class, a sampler, snapshots."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 20, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(20, 32), torch.nn.Linear(32, 2)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.dropout(F.relu(self.first(x))))


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, snapshot_path="snapshot.pt"):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.loader, self.optimizer = loader, optimizer
        self.save_every, self.snapshot_path, self.epochs_run = save_every, snapshot_path, 0
        if Path(snapshot_path).exists():
            self.load_snapshot(model)
        self.model = DDP(model)

    def load_snapshot(self, model):
        snapshot = torch.load(self.snapshot_path)
        model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        batch_size = len(next(iter(self.loader))[0])
        print(f"[{self.local_rank}] Epoch {epoch} | Batchsize: {batch_size}")
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self.run_batch(source, targets)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if self.local_rank == 0 and epoch % self.save_every == 0:
                self.save_snapshot(epoch)


def main(epochs, save_every, batch_size):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset, model = Points(320), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )
    Trainer(model, loader, optimizer, save_every).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()
    main(args.epochs, args.save_every, args.batch_size)
