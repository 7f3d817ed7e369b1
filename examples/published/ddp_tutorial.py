"""In the style of PyTorch's tutorials on DistributedDataParallel: torchrun, a sampler, epochs."""

import argparse

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
    def __init__(self, model, loader, optimizer):
        self.optimizer, self.loader = optimizer, loader
        self.model = DDP(model)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.run_batch(source, targets)


def main(epochs, batch_size):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset, model = Points(320), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=DistributedSampler(dataset),
    )
    Trainer(model, loader, optimizer).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--batch_size", type=int, default=4)
    args = parser.parse_args()
    main(args.epochs, args.batch_size)
