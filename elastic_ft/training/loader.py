"""What a loop of the user's iterates over, and the samples behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from elastic_ft.config.trained import BatchConfig
from elastic_ft.core.batches import ENDLESS, samples_in_words
from elastic_ft.data.dataset import Collated, DataBundle, Dataset
from elastic_ft.data.reading_processes import ReadingProcesses
from elastic_ft.data.stream import SampleStream
from elastic_ft.errors import ConfigError
from elastic_ft.training.batch import Batch
from elastic_ft.training.found import warn_of_length
from elastic_ft.training.torchrun import deals_nothing


class Drawn:
    """In the place of a dataset, where a script draws its micro-batches itself."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> None:
        """There is nothing to be read."""

    def collate(self, samples: list[Any]) -> None:
        """There is nothing to be read."""


class NoSampler:
    """In the place of a DataLoader's sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Has no effect: each epoch has an order of its own already."""


class Loader:
    """Gives each step's batch to a loop of the user's, until the last step."""

    def __init__(self, context: Any, bundle: DataBundle) -> None:
        self._context, self.bundle = context, bundle
        self.sampler = NoSampler()

    def __iter__(self) -> Iterator[Batch]:
        return self._context.batches()

    @property
    def is_stream(self) -> bool:
        return len(self.bundle.train) == ENDLESS

    @property
    def is_drawn(self) -> bool:
        """Whether there is no data: the script draws it."""
        return isinstance(self.bundle.train, Drawn)

    @property
    def dataset(self) -> Any:
        """That of the DataLoader."""
        train = self.bundle.train
        return train.dataset if isinstance(train, Collated) else train

    @property
    def batch_size(self) -> int:
        """Of a micro-batch."""
        size: int = self._context.job.batch.micro_batch_size
        return size

    def __len__(self) -> int:
        """Whole steps in one pass over the data, at least one: not micro-batches. Raises TypeError
        for a stream, as torch's loader does."""
        if self.is_stream:
            raise TypeError("the loader of a stream has no length")
        return steps_in(self.bundle.train, self._context.job.batch)


def steps_in(samples: Any, batch: BatchConfig) -> int:
    """Whole ones of one pass, at least one."""
    return max(1, len(samples) // batch.global_batch_size)


REFUSED = {  # options of a DataLoader, and what else
    "timeout": "elastic.hang_timeout_s of the job is the deadline of a sample",
    "worker_init_fn": "do it in the dataset, when it is first read",
    "generator": "the order is a function of the job's seed: say `seed`",
}
OF_PROCESSES = ("num_workers", "persistent_workers", "multiprocessing_context")
WITHOUT_EFFECT = ("pin_memory",)


def check_options(loader: DataLoader[Any], batch: BatchConfig) -> None:
    """Raises ConfigError for an option that can't be honoured; warns of those without effect."""
    size = batch.micro_batch_size
    for name, instead in REFUSED.items():
        if getattr(loader, name, None):
            raise ConfigError(f"DataLoader.{name}: refused: {instead}")
    if not is_stream(loader.dataset):
        check_sampler(loader)
        warn_of_length(loader, batch, steps_in(loader.dataset, batch))
    if loader.batch_size != size:
        raise ConfigError(
            f"batch.micro_batch_size: the job has {size}, the DataLoader's batch_size is "
            f"{loader.batch_size}: they are the same thing"
        )
    idle = [name for name in WITHOUT_EFFECT if getattr(loader, name, None)]
    if is_stream(loader.dataset):
        idle += [name for name in OF_PROCESSES if getattr(loader, name, None)]
    if idle:
        warnings.warn(
            f"DataLoader.{', '.join(idle)}: without effect: samples are read a step ahead, in a "
            "thread or in processes",
            stacklevel=5,
        )


def read_in_processes(loader: Loader, given: DataLoader[Any], seed: int | None) -> None:
    """Starts ``num_workers`` processes that read for it, to the end of this one.

    ``seed``: of what samples draw; None: those draw as they come, which only this process can.
    """
    if given.num_workers and loader.bundle.stream is None and seed is not None:
        context: Any = given.multiprocessing_context
        processes = ReadingProcesses(loader.bundle.train, given.num_workers, seed, context)
        loader.bundle = replace(loader.bundle, processes=processes)


def is_stream(dataset: Any) -> bool:
    """Whether it is iterated over: torch's have a ``__getitem__`` that only raises."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def check_sampler(loader: DataLoader[Any]) -> None:
    """Raises ConfigError for one that is not of the loader's own making."""
    sampler = loader.sampler
    drawn = type(sampler) is RandomSampler
    part = drawn and (sampler.replacement or sampler.num_samples != len(loader.dataset))
    if part or not (drawn or type(sampler) is SequentialSampler or deals_nothing(sampler)):
        raise ConfigError(
            f"ctx.prepare: the DataLoader has a {type(sampler).__name__} of its own: the order of "
            "samples is the job's, a function of seed and position alone; leave it out"
        )


def bundle_of(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch: BatchConfig,
    seed: int = 0,
    shuffle_buffer: int = 0,
) -> DataBundle:
    """Raises ConfigError."""
    fingerprint, stream = getattr(dataset, "_fingerprint", None), None
    if is_stream(dataset):
        sizes = (batch.global_batch_size, batch.micro_batch_size)
        dataset = stream = SampleStream(dataset, *sizes, seed, shuffle_buffer)
        fingerprint = f"{fingerprint or 'unknown'}, {stream.described}"
    elif shuffle_buffer:
        raise ConfigError(
            "ctx.loader: shuffle_buffer: is of streams; others are shuffled whole, by `seed`"
        )
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise ConfigError(f"expected a map-style dataset, or one to iterate over, found {kind}")
    samples = collated(dataset, collate_fn)
    words = samples_in_words(len(samples))
    return DataBundle(samples, None, None, None, words, fingerprint, stream=stream)


def drawn_bundle() -> DataBundle:
    """Of no data."""
    return DataBundle(Drawn(), None, None, None, "drawn by the script", "drawn by the script")


def collated(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Dataset:
    """Raises ConfigError for one without samples."""
    if collate_fn is None:
        collate_fn = dataset.collate if isinstance(dataset, Dataset) else default_collate
    samples = _With(dataset, collate_fn)
    if len(samples) == 0:
        raise ConfigError("ctx.prepare: the dataset has no samples")
    return samples


class _With(Collated):
    """A dataset with a collate function, which has as many samples as when it was prepared: their
    order, and each one's index, are made of that."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        super().__init__(dataset)
        self._collate_fn, self._count = collate_fn, len(dataset)

    def __len__(self) -> int:
        """Raises ConfigError."""
        if (count := len(self.dataset)) != self._count:
            raise ConfigError(
                f"ctx.prepare: the dataset had {self._count} samples when it was prepared, and has "
                f"{count} now: the order of samples is of so many: prepare it as it is to stay, or "
                "iterate over it (an IterableDataset)"
            )
        return count

    def collate(self, samples: list[Any]) -> Any:
        return self._collate_fn(samples)
