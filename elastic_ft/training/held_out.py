"""What an evaluation between two steps needs: its samples, and models that do not train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic_ft.data.dataset import Dataset
from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import collated, is_stream


def samples_of(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Dataset:
    """Of a DataLoader its dataset and ``collate_fn``. Raises ConfigError."""
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
