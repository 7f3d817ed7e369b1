"""Token shards in a bucket: nothing of them is copied to this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chaos.s3_server import S3Server
from elastic_ft.config import DataConfig
from elastic_ft.data.dataset import open_dataset
from elastic_ft.storage.store import open_store


def test_samples_come_from_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 500, (40, 9)).astype("<u2")
    bucket = open_store(s3.url("corpus"))
    for number, part in enumerate(np.split(ids, 4)):
        bucket.put(f"part-{number % 2}/{number}.bin", part.tobytes() + b"\0\0" * number)
    config = DataConfig(
        url=s3.url("corpus") + "/*/*.bin",
        format="token_shards",
        vocab_size=500,
        sequence_length=8,
        eval_fraction=0,
        cache_dir=str(tmp_path / "cache"),
    )
    train = open_dataset(config, 0).train
    found = train.__getitems__(range(len(train)))  # type: ignore[attr-defined]
    by_name = np.concatenate([np.split(ids, 4)[n] for n in (0, 2, 1, 3)])
    assert np.array_equal(np.stack([sample["tokens"] for sample in found]), by_name)
    assert not (tmp_path / "cache").exists()
