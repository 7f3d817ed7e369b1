"""A model's persistent buffers: the same on all ranks after each step, and in every world.

BatchNorm's running statistics are averages over micro-batches, each weighed less the longer it is
past. A rank sees a few of a step's micro-batches, one after the other; what all of them would have
made of the statistics follows from that (see ``_Average``). Any other buffer that was changed is
rank 0's, as with DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from elastic_ft.errors import ConfigError

AVERAGES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FindBuffers = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def check_batch_norms(models: list[nn.Module]) -> None:
    """Raises ConfigError for SyncBatchNorm, whose ranks wait for each other in each forward."""
    if any(isinstance(part, nn.SyncBatchNorm) for model in models for part in model.modules()):
        raise ConfigError(
            "ctx.prepare: SyncBatchNorm is refused: ranks have different numbers of micro-batches; "
            "leave BatchNorm as it is: it normalises a micro-batch, and its running statistics are "
            "those of all ranks"
        )


@dataclass(frozen=True, slots=True)
class _Average:
    """A BatchNorm's running statistics r over steps s: r <- f r + (1 - f) s, f = 1 - momentum; or
    the mean of all, without momentum. With r0 before the step, rank k after its n_k micro-batches
    has r_k = f_k r0 + c_k, and after all ranks' in order r = f_1 f_2 ... r0 + sum of w_k c_k, where
    w_k is the product of the f of the ranks after k.
    """

    part: nn.Module
    mean: torch.Tensor  # before the step, as the others
    var: torch.Tensor
    count: int

    def seen(self) -> int:
        return int(self.part.num_batches_tracked) - self.count

    def gained(self, counts: list[int], rank: int) -> torch.Tensor:
        """This rank's w_k c_k, float64 [2, features]."""
        own, after, before = counts[rank], sum(counts[rank + 1 :]), self._before
        now = torch.stack([self.part.running_mean, self.part.running_var]).double()
        if self.part.momentum is None:
            total = max(1, self.count + sum(counts))
            return (now * (self.count + own) - before * self.count) / total
        kept = 1.0 - self.part.momentum
        return (now - kept**own * before) * kept**after

    def take(self, counts: list[int], gained: torch.Tensor) -> None:
        total = sum(counts)
        if self.part.momentum is None:
            share = self.count / max(1, self.count + total)
        else:
            share = (1.0 - self.part.momentum) ** total
        mean, var = share * self._before + gained
        self.part.running_mean.copy_(mean)
        self.part.running_var.copy_(var)
        self.part.num_batches_tracked.fill_(self.count + total)

    @property
    def _before(self) -> torch.Tensor:
        return torch.stack([self.mean, self.var]).double()


class Buffers:
    """Args:
        find: the persistent ones, by name.

    Attributes:
        kept: as they were captured: a step begun in vain has changed them.
    """

    def __init__(self, models: list[nn.Module], find: FindBuffers) -> None:
        self._models, self._find = models, find
        self.kept: dict[str, torch.Tensor] = {}
        self._averages: list[_Average] | None = None  # as the micro-batches found them
        self._versions: dict[str, int] = {}  # of the others

    def capture(self) -> None:
        for name, buffer in self._find():
            if name in self.kept:
                self.kept[name].copy_(buffer)
            else:
                self.kept[name] = buffer.detach().clone()

    def put_back(self) -> None:
        self._averages = None
        with torch.no_grad():
            for name, buffer in self._find():
                buffer.copy_(self.kept[name])

    def begin(self) -> None:
        """A step's micro-batches begin to change them, unless they have since ``share``."""
        if self._averages is not None:
            return
        self._averages, averaged = [], set()
        for model in self._models:
            for part in model.modules():
                if isinstance(part, AVERAGES) and part.running_mean is not None:
                    averaged |= {id(buffer) for buffer in part.buffers(recurse=False)}
                    before = part.running_mean.clone(), part.running_var.clone()
                    count = int(part.num_batches_tracked)
                    self._averages.append(_Average(part, *before, count))
        self._versions = {n: b._version for n, b in self._find() if id(b) not in averaged}

    @torch.no_grad()
    def share(self, rank: int, world_size: int, device: torch.device) -> None:
        """All ranks have those of all micro-batches then. A collective."""
        averages, self._averages = self._averages or [], None
        if world_size == 1 or not (averages or self._versions):
            return
        found = {n: b for n, b in self._find() if n in self._versions}
        counts = torch.zeros(world_size, len(averages), dtype=torch.int64)
        counts[rank] = torch.tensor([average.seen() for average in averages], dtype=torch.int64)
        changed = [int(found[n]._version != v) for n, v in self._versions.items()]
        told = torch.cat([counts.reshape(-1), torch.tensor(changed, dtype=torch.int64)]).to(device)
        dist.all_reduce(told)
        *seen, last = told.cpu().split([len(averages)] * world_size + [len(changed)])
        for name, is_changed in zip(self._versions, last.tolist(), strict=True):
            if is_changed:
                dist.broadcast(found[name], src=0)
        if averages:
            each = torch.stack(seen, 1).tolist()
            parts = [a.gained(c, rank) for a, c in zip(averages, each, strict=True)]
            flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
            dist.all_reduce(flat)
            pieces = flat.split([part.numel() for part in parts])
            for average, ranks, piece in zip(averages, each, pieces, strict=True):
                average.take(ranks, piece.view(2, -1).to(average.mean.device))
