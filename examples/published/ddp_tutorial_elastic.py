"""In the style of PyTorch's tutorials on DistributedDataParallel: a class, a sampler, snapshots."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import elastic_ft

ctx = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})


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
        self.model, self.loader, self.optimizer = ctx.prepare(model, loader, optimizer)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        ctx.each(self.loader)(self.run_batch)

    def train(self, epochs):
        for epoch in ctx.epochs(epochs):
            self.run_epoch(epoch)


def main(epochs, save_every, batch_size):
    torch.manual_seed(0)
    dataset, model = Points(320), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=False,
    )
    Trainer(model, loader, optimizer, save_every).train(epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()
    main(args.epochs, args.save_every, args.batch_size)
