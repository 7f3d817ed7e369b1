"""In the style of PyTorch's DCGAN example, on points: two models, two optimizers, three losses."""

import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import elastic_ft

nz, real_label, fake_label, niter = 4, 1.0, 0.0, 5
ctx = elastic_ft.init(batch={"global_batch_size": 32, "micro_batch_size": 4})
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 8).cumsum(1))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), drop_last=True)
netG = DDP(nn.Sequential(nn.Linear(nz, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)))
netD = DDP(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
*_, loader = ctx.prepare(netG, netD, optimizerD, optimizerG, loader)

for epoch in ctx.epochs(niter):
    loader.sampler.set_epoch(epoch)

    @ctx.each(loader, enumerated=True)
    def train_step(i, data):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = data[0]
        label = torch.full((real.size(0),), real_label)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(torch.randn(real.size(0), nz))
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        nn.utils.clip_grad_norm_(netD.parameters(), 1.0)
        optimizerD.step()
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        if i % 4 == 0:
            print(f"[{i}/{len(loader)}] Loss_D: {errD_real + errD_fake:.4f} Loss_G: {errG:.4f}")
