"""A model that begins as a folder of Hugging Face's: config.json, and safetensors read by range."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from elastic_ft.config import Job, ModelConfig
from elastic_ft.errors import BaseAway, ModelError, StorageError, StoreFailed
from elastic_ft.models.build import known_settings
from elastic_ft.storage.safetensors import (
    CONFIG,
    INDEX,
    SINGLE,
    SafetensorsFolder,
    Stored,
    open_folder,
)
from elastic_ft.storage.shards import THREADS, parallel
from elastic_ft.storage.store import open_store

KEY = "model.pretrained"
PIECES, PIECE_BYTES = 4, 16 * 1024  # of each tensor, in its digest
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Attributes:
    config: of config.json, what transformers' configuration knows.
    digest: tells these weights from others, however they are divided into files.
    """

    folder: SafetensorsFolder
    config: Mapping[str, object]
    digest: str


def open_pretrained(url: str) -> Pretrained:
    """Reads config.json, headers, and PIECES of each tensor. Raises ModelError, one line: BaseAway
    if the store does not answer."""
    try:
        folder = _open(url)
        config = known_config(folder)
        return Pretrained(folder, config, _digest(folder, config))
    except StoreFailed as error:
        raise BaseAway(f"{KEY}: {error}") from None
    except StorageError as error:
        raise ModelError(f"{KEY}: {error}") from None


def known_config(folder: SafetensorsFolder) -> Mapping[str, object]:
    """Of its config.json, what transformers knows. Raises ModelError, StoreFailed."""
    config = folder.config()
    if "model_type" not in config:
        raise ModelError(f"{KEY}: {folder.url}: no {CONFIG} with a model_type is there")
    return known_settings(config, KEY)


def check_same(folder: SafetensorsFolder, config: Mapping[str, object], digest: str) -> None:
    """Raises ModelError if these are not the weights whose digest it is, StoreFailed."""
    if digest != (found := _digest(folder, config)):
        raise ModelError(
            f"{KEY}: {folder.url} has other weights than the run began with (digest {found}, not "
            f"{digest}): put those back"
        )


def _open(url: str) -> SafetensorsFolder:
    try:
        return open_folder(url)
    except StorageError:
        if url.endswith(".safetensors"):
            raise
        store = open_store(url)
        pickled = [name for name in PICKLES if store.exists(name)]
        if not pickled or store.exists(INDEX) or store.exists(SINGLE):
            raise
        raise ModelError(
            f"{KEY}: {store.url} has {pickled[0]}: pickles run code as they are read, and can't be "
            "read in parts; save it as safetensors (save_pretrained does)"
        ) from None


def _digest(folder: SafetensorsFolder, config: Mapping[str, object]) -> str:
    """Of the configuration; of each tensor, its name, type, shape and PIECES of PIECE_BYTES, from
    its first byte to its last: all of it where that is less than they are together."""
    hashed = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    names = sorted(folder.tensors)

    def of_one(name: str) -> bytes:
        stored = folder.tensors[name]
        found = xxhash.xxh3_128(f"{name} {stored.spec.dtype} {stored.spec.shape}".encode())
        for start, stop in _pieces(stored):
            found.update(folder.store.get(stored.file, start, stop))
        return found.digest()

    for digest in parallel(of_one, names, THREADS):
        hashed.update(digest)
    return hashed.hexdigest()


def _pieces(stored: Stored) -> Iterator[tuple[int, int]]:
    """Where they begin and end in the file."""
    nbytes = stored.stop - stored.start
    if nbytes <= PIECES * PIECE_BYTES:
        if nbytes:
            yield stored.start, stored.stop
        return
    last = nbytes - PIECE_BYTES
    for number in range(PIECES):
        start = stored.start + last * number // (PIECES - 1)
        yield start, start + PIECE_BYTES


def resolved(model: ModelConfig) -> tuple[ModelConfig, str | None]:
    """``model`` with what the folder of its ``pretrained`` says, as ``transformers`` and
    ``weights``; and that folder's digest. Any other model as it is, and None. Raises ModelError."""
    if model.pretrained is None:
        return model, None
    found = open_pretrained(model.pretrained)
    values = {"transformers": dict(found.config), "weights": model.pretrained}
    return model.model_copy(update=values), found.digest


def as_told(job: Job, config: str) -> Job:
    """``job`` with what the folder of its ``pretrained`` is known to say (``config_text``)."""
    values = {"transformers": json.loads(config), "weights": job.model.pretrained}
    return job.model_copy(update={"model": job.model.model_copy(update=values)})


def config_text(job: Job) -> str | None:
    """Of a job whose ``pretrained`` has been read; None of any other."""
    read = job.model.pretrained is not None and job.model.transformers is not None
    return json.dumps(job.model.transformers, sort_keys=True) if read else None


def with_model_read(job: Job) -> tuple[Job, str | None]:
    """As ``resolved``, of a job."""
    model, digest = resolved(job.model)
    return (job if digest is None else job.model_copy(update={"model": model})), digest
