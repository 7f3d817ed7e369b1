"""In the style of Lightning Fabric's image classifier: epochs, a held-out set between them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import elastic_ft


class Images(torch.utils.data.Dataset):
    """Which half is brighter."""

    def __init__(self, count, seed):
        self.x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x[:, :, :4].mean((1, 2, 3)) > self.x[:, :, 4:].mean((1, 2, 3))).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.first, self.last = nn.Linear(288, 32), nn.Linear(32, 2)

    def forward(self, x):
        x = self.dropout(F.relu(self.norm(self.convolution(x)))).flatten(1)
        return F.log_softmax(self.last(F.relu(self.first(x))), 1)


def main(epochs=4):
    fabric = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})
    fabric.launch()
    torch.manual_seed(1)
    with fabric.rank_zero_first():
        images, test_images = Images(320, 0), Images(64, 1)
    loader = DataLoader(images, batch_size=4)
    test_loader = DataLoader(test_images, batch_size=4)
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    for epoch in fabric.epochs(1, epochs + 1):
        model.train()

        @fabric.each(loader, enumerated=True)
        def train_step(index, data, target):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
            if index % 5 == 0:
                print(f"batch {index} of {len(loader)}: {loss:.4f}")

        scheduler.step()
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                test_loss += F.nll_loss(model(data), target, reduction="sum").item()
        test_loss = fabric.all_gather(test_loss).sum() / len(test_loader.dataset)
        print(f"epoch {epoch}: held-out loss {test_loss:.4f}")
        fabric.log("test_loss", test_loss, step=epoch)
    fabric.save("images.pt", model.state_dict())


main()
