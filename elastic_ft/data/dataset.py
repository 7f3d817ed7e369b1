"""Datasets: what a job's ``data`` section opens.

A dataset maps an index to a sample and knows nothing of ranks; which index is read when, and by
whom, is ``core.batches``' matter (I2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from elastic_ft.config import DataConfig
from elastic_ft.data.corpus import Corpus, open_corpus
from elastic_ft.data.epoch_order import EpochOrder
from elastic_ft.data.reading_processes import ReadingProcesses
from elastic_ft.data.stream import SampleStream
from elastic_ft.data.token_shards import TokenShards, find_shards
from elastic_ft.errors import DataError, one_line, redacted
from elastic_ft.models.imports import call_object, import_object
from elastic_ft.models.loss import IGNORED_LABEL


@runtime_checkable
class Dataset(Protocol):
    """A map-style dataset. ``dataset[i]`` depends on ``i`` alone (I3).

    A sample is a tensor, or a dict or tuple of tensors.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def collate(self, samples: list[Any], /) -> Any:
        """Returns the samples as one micro-batch, what ``models.loss.loss_sum`` takes."""


@dataclass(frozen=True)
class DataBundle:
    """Open data. What a user's dataset does not tell (no such attribute) is None."""

    train: Dataset
    evaluation: Dataset | None
    vocab_size: int | None
    sequence_length: int | None
    description: str  # one line, for people
    fingerprint: str | None = None  # of the tokens: differs if two workers read different data
    order: EpochOrder | None = None  # of the samples, if that is not the job's own
    stream: SampleStream | None = None  # behind ``train``
    processes: ReadingProcesses | None = None  # which read ``train``


def positions_in_documents(tokens: Tensor, end_id: int) -> Tensor:
    """Of each token of a row, how many of its document are before it there."""
    places = torch.arange(len(tokens))
    begins = torch.zeros_like(places)
    begins[1:] = torch.where(tokens[:-1] == end_id, places[1:], 0)
    return places - begins.cummax(dim=0).values


class Windows:
    """Consecutive, non-overlapping windows of a row of tokens, read through a memory map.

    ``windows[i]`` is ``{"tokens": int64 [length]}``. Where the corpus tells what ends a document,
    ``position_ids`` begin anew after it, and ``labels`` leave out each document's first token.
    Pickles as its arguments, not as its data.
    """

    def __init__(self, corpus: Corpus, length: int, first: int, count: int) -> None:
        self._arguments = (corpus, length, first, count)
        self._length, self._first, self._count = length, first, count
        self._end_id = corpus.end_id
        self._tokens = np.memmap(corpus.tokens_file, corpus.dtype, "r", shape=corpus.token_count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of a dataset of {self._count}")
        start = (self._first + index) * self._length
        tokens = torch.from_numpy(self._tokens[start : start + self._length].astype("i8"))
        if self._end_id is None:
            return {"tokens": tokens}
        position_ids = positions_in_documents(tokens, self._end_id)
        labels = tokens.masked_fill(position_ids == 0, IGNORED_LABEL)
        return {"tokens": tokens, "labels": labels, "position_ids": position_ids}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the samples as rows, int64 [samples, length] each."""
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    def __reduce__(self) -> tuple[type[Windows], tuple[Any, ...]]:
        return Windows, self._arguments


class Collated:
    """A user's dataset that has no ``collate``, with torch's default one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """As torch's own loader asks: at once, where the dataset can."""
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]

    def seeded_by(self, begin: Callable[[int], None]) -> None:
        """As ``SampleStream.seeded_by``, if it is one."""
        if isinstance(self.dataset, SampleStream):
            self.dataset.seeded_by(begin)

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)


def open_dataset(config: DataConfig, seed: int) -> DataBundle:
    """Returns the training and held-out samples that ``config`` names.

    From a URL: windows of ``sequence_length + 1`` tokens; the last ``eval_fraction`` of them are
    held out. From an import path: what the callable returns for its kwargs, a dataset or a pair
    (train, evaluation); it is given ``seed`` too if it has a parameter of that name and no kwarg.
    Raises DataError or StorageError, one line.
    """
    if config.url is None:
        bundle = _open_path(config, seed)
    else:
        bundle = _open_shards(config) if config.format == "token_shards" else _open_url(config)
    if config.eval_every_steps and bundle.evaluation is None:
        raise DataError(
            f"data.eval_every_steps: {config.eval_every_steps}, but no samples are held out "
            f"({bundle.description})"
        )
    return bundle


def _open_url(config: DataConfig) -> DataBundle:
    corpus = open_corpus(config)
    length = config.sequence_length + 1
    train, held_out = _split(config, corpus.token_count // length, corpus.token_count)
    return DataBundle(
        train=Windows(corpus, length, 0, train),
        evaluation=Windows(corpus, length, train, held_out) if held_out else None,
        vocab_size=corpus.vocab_size,
        sequence_length=config.sequence_length,
        description=(
            f"{redacted(str(config.url)).rstrip(':')}: {corpus.file_count} files, "
            f"{corpus.token_count:,} tokens, "
            f"vocabulary {corpus.vocab_size}; {_in_words(config, train, held_out)}"
        ),
        fingerprint=corpus.fingerprint,
    )


def _open_shards(config: DataConfig) -> DataBundle:
    shards, fingerprint = find_shards(config)
    train, held_out = _split(config, shards.count, shards.count * shards.length)
    return DataBundle(
        train=TokenShards(shards, 0, train),
        evaluation=TokenShards(shards, train, held_out) if held_out else None,
        vocab_size=config.vocab_size,
        sequence_length=config.sequence_length,
        description=(
            f"{redacted(str(config.url))}: {len(shards.keys)} files read where they are, "
            f"vocabulary {config.vocab_size}; {_in_words(config, train, held_out)}"
        ),
        fingerprint=fingerprint,
    )


def _split(config: DataConfig, windows: int, tokens: int) -> tuple[int, int]:
    """How many train, and how many are held out."""
    if windows == 0:
        raise DataError(
            f"data.url: {config.url}: found {tokens} tokens, one sample needs "
            f"{config.sequence_length + 1} (data.sequence_length {config.sequence_length} and the "
            f"next token)"
        )
    held_out = int(windows * config.eval_fraction)
    return windows - held_out, held_out


def _in_words(config: DataConfig, train: int, held_out: int) -> str:
    return f"{train} training and {held_out} held-out samples of {config.sequence_length} tokens"


def _open_path(config: DataConfig, seed: int) -> DataBundle:
    assert config.path is not None  # DataConfig has exactly one of url and path
    function = import_object(config.path, "data.path", DataError)
    seeded = {"seed": seed} if _has_parameter(function, "seed") else {}
    made = call_object(config.path, seeded | config.kwargs, "data.path", DataError)
    train, evaluation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    train_set = _checked(train, config.path)
    evaluation_set = None if evaluation is None else _checked(evaluation, config.path)
    held_out = 0 if evaluation_set is None else len(evaluation_set)
    return DataBundle(
        train=train_set,
        evaluation=evaluation_set,
        vocab_size=getattr(train, "vocab_size", None),
        sequence_length=getattr(train, "sequence_length", None),
        description=f"{config.path}: {len(train_set)} training and {held_out} held-out samples",
    )


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not callable, or a builtin without a signature
        return False


def _checked(dataset: Any, path: str) -> Dataset:
    kind = type(dataset).__name__
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"data.path: {path} returned {kind}, expected a map-style dataset "
            "(__len__ and __getitem__) or a pair of them"
        )
    try:
        count = len(dataset)
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"data.path: {path}: len() failed: {one_line(error)}") from error
    if count == 0:
        raise DataError(f"data.path: {path} returned a {kind} without samples")
    return dataset if isinstance(dataset, Dataset) else Collated(dataset)
