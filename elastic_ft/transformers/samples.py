"""The samples of a micro-batch until they are collated, and a trainer's order of them."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import SequentialSampler
from transformers import BatchEncoding

from elastic_ft.data.epoch_order import EpochOrder
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.modules import seed_for, to_device
from elastic_ft.errors import ConfigError


class Samples:
    """As they were read, in a thread; collators may draw at random, so they come after that."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


def collated_alike(
    micro_batch: MicroBatch, collate: Callable[[list[Any]], Any], seed: int | None, step: int
) -> Any:
    """With the same draws wherever that is done; ``seed`` None: with those that come next."""
    # Of a step that is made again they come again, and collators change what they are given.
    samples = [s.copy() if isinstance(s, (dict, list)) else s for s in micro_batch.data.samples]
    if seed is None:
        return collate(samples)
    with _drawing(seed, step, micro_batch.number):
        return collate(samples)


def sent(inputs: Any, device: torch.device, lock: Callable[[Any], Any]) -> Any:
    """On a GPU, by copies for which nobody waits: a trainer's own wait for the micro-batch before.

    ``lock``: page-locks them. What is of a class of the user's the trainer's own copies keep so.
    """
    is_plain = type(inputs) is dict or isinstance(inputs, BatchEncoding)
    return to_device(lock(inputs), device) if device.type == "cuda" and is_plain else inputs


@contextlib.contextmanager
def _drawing(seed: int, step: int, number: int) -> Iterator[None]:
    with draws_kept():
        seed_for(seed, step, number)
        drawn = int(torch.randint(1 << 31, ()))
        np.random.seed(drawn)
        random.seed(drawn)
        yield


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """The generators are afterwards as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def epoch_order(loader: Any, strategy: str) -> EpochOrder:
    """The order of a trainer's own loader: as the stock trainer's in a world of one.

    Raises ConfigError for a sampler of which it isn't known to be a function of the epoch.
    """
    sampler = copy.copy(loader.batch_sampler.sampler)
    size = len(loader.dataset)
    if strategy == "sequential" and isinstance(sampler, SequentialSampler):
        return EpochOrder(size, lambda _: range(size))
    if not isinstance(sampler, SeedableRandomSampler):
        raise ConfigError(
            f"Trainer.get_train_dataloader: its sampler is a {type(sampler).__name__}: the order "
            "of samples must be a function of the epoch alone: leave the sampler out"
        )

    def shuffled(epoch: int) -> Iterator[int]:
        sampler.set_epoch(epoch)
        return iter(list(sampler))

    return EpochOrder(size, shuffled)
