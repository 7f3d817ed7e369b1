"""What an evaluation between two steps needs: its samples, and models that do not train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_ft.data.dataset import Dataset
from elastic_ft.engines.modules import to_device
from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import NoSampler, collated, is_stream

TRAINED_ON = (
    "ctx.prepare: a loader beside the one that is trained on was gone over while steps are made: "
    "it gives each rank the same: make one loader of both, of a dataset whose samples have a part "
    "of each; held-out data is gone through between two steps"
)


class HeldOut:
    """A DataLoader that is not trained on: each rank goes through all of it, between two steps.

    Args:
        loader: all that is asked of this, but its batches, is asked of that.
    """

    def __init__(self, context: Any, loader: DataLoader[Any]) -> None:
        self._context, self.loader = context, loader

    def __iter__(self) -> Iterator[Any]:
        """Its batches, on the context's device. Raises ConfigError."""
        began, batches = self._context.awaited_step, iter(self.loader)
        return self._moved(batches, began)

    def _moved(self, batches: Iterator[Any], began: int | None) -> Iterator[Any]:
        for batch in batches:
            if self._context.awaited_step != began:
                raise ConfigError(TRAINED_ON)
            yield to_device(batch, self._context.device)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        """The loader's own, whose epoch may be set, whatever it is."""
        own = self.loader.sampler
        if not hasattr(own, "set_epoch"):
            own.set_epoch = NoSampler().set_epoch
        return own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def samples_of(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Dataset:
    """Of a DataLoader its dataset and ``collate_fn``. Raises ConfigError."""
    if isinstance(dataset, HeldOut):
        dataset = dataset.loader
    if isinstance(dataset, DataLoader):
        dataset, collate_fn = dataset.dataset, collate_fn or dataset.collate_fn
    if is_stream(dataset) or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise ConfigError(f"ctx.evaluate: expected a map-style dataset, found {kind}")
    return collated(dataset, collate_fn)


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Without gradients; each module is then as it was."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
