"""One worker of ``benchmarks/own_loop.py``: the same training by a plain loop and by the loop API.

    torchrun ... own_loop_worker.py FOLDER ddp|fsdp      # plain
    elastic-ft launch --job JOB.yaml ... own_loop_worker.py FOLDER

Each worker writes a line per step, with the processor time of its process (all threads) so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO, WORDS, WIDTH, LAYERS = 4, 1024, 128, 4
LENGTH = int(os.environ.get("OWN_LOOP_LENGTH", "64"))  # tokens of a sample
SAMPLES = 4096


class Decoder(nn.Module):
    """About a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words(x) + self.places.weight
        for layer in self.layers:
            found = layer(found, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(found)
        return logits


def made() -> tuple[nn.Module, TensorDataset]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = Decoder(), torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    return model, TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Told:
    def __init__(self, folder: str) -> None:
        self._file, self._step = (Path(folder) / f"{os.getpid()}.jsonl").open("a"), 0

    def step(self) -> None:
        self._step += 1
        line = {"step": self._step, "cpu_s": time.process_time(), "at_s": time.time()}
        line["thread_s"] = time.thread_time()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def plain(folder: str, strategy: str) -> None:
    dist.init_process_group("gloo")
    model, dataset = made()
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=MICRO, sampler=sampler, drop_last=True)
    if strategy == "fsdp":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
        runner = model
    else:
        runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, told = adamw(model), Told(folder)
    while True:
        for x, y in loader:
            loss_of(runner, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            told.step()


def elastic(folder: str) -> None:
    import elastic_ft

    ctx = elastic_ft.init()
    model, dataset = made()
    loader = DataLoader(dataset, batch_size=MICRO)
    optimizer, told = adamw(model), Told(folder)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)

    @ctx.each(loader)
    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        ctx.backward(loss_of(model, x, y))
        ctx.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.step()


if __name__ == "__main__":
    plain(*sys.argv[1:]) if len(sys.argv) > 2 else elastic(sys.argv[1])
