"""A loader's batches in rounds, one for each rank, and what is gathered of a round.

What comes out is in the loader's order, as if one process had seen all: so are metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from elastic_ft.training.context import Context


class DealtBatches:
    """In the place of a trainer's evaluation loader, in a world of more than one.

    In the last round ranks may have no batch: they repeat one, and are left out.
    """

    def __init__(self, loader: Any, context: Context, progress: Callable[[], None]) -> None:
        self._loader, self._progress, self._context = loader, progress, context
        self._rank, self._world = context.rank, context.world_size
        self._batches = list(loader.batch_sampler)
        self._real, self._size = 1, 0  # of the running round: ranks with a batch, my samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return -(-len(self._batches) // self._world)

    def __iter__(self) -> Iterator[Any]:
        mine = self._batches[self._rank :: self._world]
        missing = len(self) - len(mine)
        mine = mine + self._batches[:1] * missing
        loader = DataLoader(
            self._loader.dataset,
            batch_sampler=mine,
            collate_fn=self._loader.collate_fn,
            num_workers=self._loader.num_workers,
        )
        for number, batch in enumerate(loader):
            self._progress()
            self._real = min(self._world, len(self._batches) - number * self._world)
            self._size = len(mine[number])
            yield batch

    def gather(self, data: Any) -> Any:
        """Of the ranks that have a batch, their samples, one rank after the other."""
        if isinstance(data, (tuple, list)):
            return type(data)(self.gather(item) for item in data)
        if isinstance(data, dict):
            return {key: self.gather(item) for key, item in data.items()}
        own = data.detach()
        own = own.reshape(1) if own.dim() == 0 else own[: self._size]  # repeated losses: as many
        shapes = self._gathered(torch.tensor(own.shape, dtype=torch.int64))  # read on the host
        longest = max(int(shape.prod()) for shape in shapes)
        flat = F.pad(own.reshape(-1), (0, longest - own.numel()))
        parts = zip(shapes, self._gathered(flat), strict=True)
        whole = [part[: int(s.prod())].view(s.tolist()) for s, part in parts]
        return torch.cat(whole[: self._real])

    def pad(self, data: Any, dim: int, value: int) -> Any:
        """To the longest of all ranks, at the end of ``dim``."""
        if isinstance(data, (tuple, list)):
            return type(data)(self.pad(item, dim, value) for item in data)
        if isinstance(data, dict):
            return {key: self.pad(item, dim, value) for key, item in data.items()}
        if dim >= data.dim():
            return data
        longest = max(int(other) for other in self._gathered(torch.tensor([data.shape[dim]])))
        sizes = [0, 0] * (data.dim() - dim - 1) + [0, longest - data.shape[dim]]
        return F.pad(data, sizes, value=value)

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._context.all_gather(tensor)


class Watched:
    """A loader of which each batch is a mark of progress."""

    def __init__(self, loader: Any, progress: Callable[[], None]) -> None:
        self._loader, self._progress = loader, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._progress()
            yield batch
