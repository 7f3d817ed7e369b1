"""Token shards: samples read by their range of bytes, from files that nobody copies."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ft.config import DataConfig
from elastic_ft.data import token_shards
from elastic_ft.data.dataset import open_dataset
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.errors import DataError, StoreFailed
from elastic_ft.storage.store import Store

LENGTH = 9  # tokens of a sample


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(url: object, **changes: Any) -> DataConfig:
        values = {"url": str(url), "format": "token_shards", "vocab_size": 60_000}
        values |= {"sequence_length": LENGTH - 1, "cache_dir": str(tmp_path / "cache")}
        return DataConfig.model_validate(values | changes)

    return make


def write(folder: Path, *counts: int, dtype: str = "<u2") -> np.ndarray:
    """One file of so many tokens each; returns all tokens of whole samples."""
    folder.mkdir(exist_ok=True)
    ids, whole = np.random.default_rng(0).integers(0, 60_000, sum(counts)).astype(dtype), []
    for number, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
        part.tofile(folder / f"{number:03}.bin")
        whole.append(part[: len(part) // LENGTH * LENGTH])
    return np.concatenate(whole).reshape(-1, LENGTH)


def rows(dataset: Any) -> np.ndarray:
    return np.stack([dataset[i]["tokens"].numpy() for i in range(len(dataset))])


@pytest.mark.parametrize("width", [2, 4])
def test_every_sample_is_there_once_and_none_crosses_a_file(
    config: Any, tmp_path: Path, width: int
) -> None:
    expected = write(tmp_path / "shards", 100, 8, 27, 1000, dtype=f"<u{width}")
    bundle = open_dataset(config(tmp_path / "shards", token_bytes=width, eval_fraction=0.1), 0)
    assert bundle.evaluation is not None and bundle.vocab_size == 60_000
    together = np.concatenate([rows(bundle.train), rows(bundle.evaluation)])
    assert np.array_equal(together, expected)
    assert len(bundle.evaluation) == len(expected) // 10
    assert not (tmp_path / "cache").exists(), "nothing is copied"
    few = open_dataset(config(tmp_path / "shards", token_bytes=width, max_tokens=115), 0)
    assert np.array_equal(rows(few.train), expected[: 115 // LENGTH])
    copied = pickle.loads(pickle.dumps(bundle.train))
    assert torch.equal(copied[3]["tokens"], bundle.train[3]["tokens"])
    with pytest.raises(IndexError):
        bundle.train[len(bundle.train)]


def test_the_same_files_elsewhere_are_the_same_data(config: Any, tmp_path: Path) -> None:
    found = []
    for place, changed in (("a", None), ("b", None), ("c", 3)):
        write(tmp_path / place, 100, 200)
        if changed is not None:
            with (tmp_path / place / "001.bin").open("r+b") as file:
                file.write(b"\1\1\1\1")
        found.append(open_dataset(config(tmp_path / place), 0).fingerprint)
    assert found[0] == found[1] != found[2]


def test_a_terabyte_is_open_at_once(config: Any, tmp_path: Path) -> None:
    """Sparse files: of 1,000 GB, none is read but for some KB."""
    for number in range(100):
        with (tmp_path / f"{number:03}.bin").open("wb") as file:
            file.truncate(10_000_000_000)
    began_s = time.monotonic()
    bundle = open_dataset(config(tmp_path, sequence_length=2047, eval_fraction=1e-7), 0)
    micro_batch = [0, len(bundle.train) // 2, len(bundle.train) - 1]
    assert len(bundle.train) > 244_000_000
    with Prefetcher(bundle.train) as prefetcher:
        prefetcher.request(1, [micro_batch])
        (loaded,) = prefetcher.get(1)
    assert loaded.ids == tuple(micro_batch) and loaded.data["tokens"].shape == (3, 2048)
    assert time.monotonic() - began_s < 60


def test_what_can_not_be_a_sample_is_named(config: Any, tmp_path: Path) -> None:
    write(tmp_path / "shards", 100, 200)
    known = open_dataset(config(tmp_path / "shards", vocab_size=300), 0)
    with pytest.raises(DataError, match=r"000.bin: token \d+, within 9 from token 18, is outside"):
        known.train[2]
    (tmp_path / "shards" / "001.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"001.bin has become shorter than 36"):
        known.train[12]
    assert len(open_dataset(config(tmp_path / "shards", eval_fraction=0), 0).train) == 11
    with pytest.raises(DataError, match="found 0 tokens, one sample needs 100000"):
        open_dataset(config(tmp_path / "shards", sequence_length=99_999), 0)
    (tmp_path / "shards" / "002.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match="3 bytes are no whole number of 2-byte tokens"):
        open_dataset(config(tmp_path / "shards"), 0)
    for wrong in ({"vocab_size": None}, {"separate_documents": True}):
        values = {"url": "x", "format": "token_shards", "vocab_size": 999} | wrong
        with pytest.raises(ValueError, match="token_shards"):
            DataConfig.model_validate({k: v for k, v in values.items() if v is not None})


def test_a_store_that_is_away_for_a_while_is_asked_again(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shards", 100)
    train = open_dataset(config(tmp_path / "shards"), 0).train
    real, refused = Store.get, [3]

    def get(self: Store, *told: Any) -> bytes:
        if refused[0]:
            refused[0] -= 1
            raise token_shards.StoreError("refused", token_shards.FailureKind.UNREACHABLE)
        return real(self, *told)

    monkeypatch.setattr(Store, "get", get)
    monkeypatch.setattr(token_shards, "PAUSE_S", 0.001)
    assert train[0]["tokens"].shape == (LENGTH,) and refused == [0]
    monkeypatch.setattr(token_shards, "OUTAGE_S", 0.0)
    refused[0] = 1
    with pytest.raises(StoreFailed):
        train[0]
