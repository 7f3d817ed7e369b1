"""A model's persistent buffers: the same on all ranks after each step, and in every world.

BatchNorm's running statistics are averages over micro-batches, each weighed less the longer it is
past. A rank sees a few of a step's micro-batches, one after the other; what all of them would have
made of the statistics follows from that (see ``_Average``). Any other buffer that was changed is
rank 0's, as with DDP. What forwards behind a step's last agreement make of statistics is undone:
no rank tells the others of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_ft.errors import ConfigError
from elastic_ft.models.named import is_waited_for

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
class BufferPlace:
    """Where a module has a buffer, which may be another one with each step."""

    name: str
    owner: nn.Module
    key: str

    @property
    def buffer(self) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self.owner, self.key)
        return found


def persistent_places(model: nn.Module, prefix: str = "") -> list[BufferPlace]:
    """Of each persistent buffer once. Looking for them goes through all modules."""
    kept, places = model.state_dict().keys(), dict[int, BufferPlace]()
    for path, part in model.named_modules():
        for key, buffer in part.named_buffers(path, recurse=False):
            if key in kept:
                place = BufferPlace(f"{prefix}{key}", part, key.rpartition(".")[2])
                places.setdefault(id(buffer), place)
    return list(places.values())


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
    count: torch.Tensor
    seen: tuple[int, int]

    def gained(self, start: int, counts: list[int], rank: int) -> torch.Tensor:
        """This rank's w_k c_k, float64 [2, features]; and rank 0's f_1 f_2 ... r0 with it.

        ``start``: rank 0's ``count``. Between steps ranks may have come apart.
        """
        own, after, total, before = counts[rank], sum(counts[rank + 1 :]), sum(counts), self._before
        now = torch.stack([self.part.running_mean, self.part.running_var]).double()
        if self.part.momentum is None:
            samples = max(1, start + total)
            gained, share = (now * (self.count + own) - before * self.count) / samples, start
            return gained + before * (share / samples) if rank == 0 else gained
        kept = 1.0 - self.part.momentum
        gained = (now - kept**own * before) * kept**after
        return gained + before * kept**total if rank == 0 else gained

    def put(self, values: torch.Tensor, count: int) -> None:
        self.part.running_mean.copy_(values[0])
        self.part.running_var.copy_(values[1])
        self.part.num_batches_tracked.fill_(count)

    def put_back(self) -> None:
        self.part.running_mean.copy_(self.mean)
        self.part.running_var.copy_(self.var)
        self.part.num_batches_tracked.copy_(self.count)

    @property
    def has_moved(self) -> bool:
        """Whether a forward has come since. No device is asked where torch counted no change."""
        is_same = _seen(self.part) == self.seen
        return not is_same and bool(self.part.num_batches_tracked > self.count)

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
        self._parts: list[Any] | None = None  # that have them
        self._others: list[str] = []

    def capture(self) -> None:
        for name, buffer in self._find():
            if name in self.kept:
                self.kept[name].copy_(buffer)
            else:
                self.kept[name] = buffer.detach().clone()

    def put_back(self) -> None:
        self._averages = None
        put_into(self._find(), self.kept)

    def begin(self) -> None:
        """A step's micro-batches begin to change them, unless they have since ``share``."""
        if self._averages is not None:
            return
        if self._parts is None:
            self._parts = self._sort_out()
        self._averages = [
            _Average(part, part.running_mean.clone(), part.running_var.clone(), count, _seen(part))
            for part, count in zip(self._parts, _counts(self._parts), strict=True)
        ]

    def _sort_out(self) -> list[Any]:
        """Once: it goes through all modules."""
        parts = [p for m in self._models for p in m.modules() if isinstance(p, AVERAGES)]
        parts = [part for part in parts if part.running_mean is not None]
        averaged = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
        self._others = [name for name, buffer in self._find() if id(buffer) not in averaged]
        return parts

    @torch.no_grad()
    def share(
        self, rank: int, world_size: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        """All ranks have those of all micro-batches then. A collective. ``check``: raises if one
        was aborted, after which its result may be anything."""
        averages = self._averages or []
        if world_size > 1 and (averages or self._others):
            self._exchange(averages, rank, world_size, device, check)
        self._averages = None
        self.begin()

    def _exchange(
        self,
        averages: list[_Average],
        rank: int,
        world_size: int,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        """One wait for the device. What else is made of it by then is looked at with the step's own
        sums: where a collective was aborted there is no step, and buffers are put back."""
        found, width, behind = dict(self._find()), len(averages), (world_size + 1) * len(averages)
        told = torch.zeros(behind + len(self._others), dtype=torch.int64, device=device)
        for at, name in enumerate(self._others, behind):
            told[at] = _differ(found[name], self.kept[name])
        if averages:
            before = torch.stack([average.count for average in averages])
            now = torch.stack([average.part.num_batches_tracked for average in averages])
            told[rank * width :][:width] = now - before
            if rank == 0:
                told[world_size * width :][:width] = before
        dist.all_reduce(told)
        numbers = told.tolist()
        check()
        for name, is_changed in zip(self._others, numbers[behind:], strict=True):
            if is_changed:
                raw = _bytes_of(found[name]).to(device)  # Gloo does not know all dtypes
                dist.broadcast(raw, src=0)
                found[name].copy_(raw.view(found[name].dtype).view(found[name].shape))
        if averages:
            each = [
                (numbers[behind - width + n], numbers[n : behind - width : width])
                for n in range(width)
            ]
            parts = [a.gained(*told, rank) for a, told in zip(averages, each, strict=True)]
            flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
            dist.all_reduce(flat)
            pieces = flat.split([part.numel() for part in parts])
            for average, (start, ranks), piece in zip(averages, each, pieces, strict=True):
                average.put(piece.view(2, -1).to(average.mean.device), start + sum(ranks))

    @torch.no_grad()
    def end(self) -> None:
        """The step's function has returned."""
        averages, self._averages = self._averages or [], None
        for average in averages:
            if average.has_moved:
                average.put_back()


@torch.no_grad()
def put_into(buffers: Iterable[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]) -> None:
    for name, buffer in buffers:
        buffer.copy_(kept[name])


def _counts(parts: list[Any]) -> list[torch.Tensor]:
    """Of the micro-batches that each has seen, in memory of their own."""
    return [*torch.stack([p.num_batches_tracked for p in parts]).unbind()] if parts else []


def _seen(part: Any) -> tuple[int, int]:
    """Of how many micro-batches it was: another one's where that is another."""
    return id(part.num_batches_tracked), part.num_batches_tracked._version


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | bool:
    """To be asked for, where they are on a device."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return True
    if not is_waited_for(a.device):
        return not torch.equal(_bytes_of(a), _bytes_of(b))
    return (_bytes_of(a) != _bytes_of(b)).any()
