"""A user's dataset, given as an import path, and each mistake in it as one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_ft.data.dataset import DataBundle, open_dataset
from elastic_ft.errors import DataError


class Squares:
    """A user's dataset, as torch's own are: no ``collate``."""

    vocab_size = 11

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index), "y": torch.tensor(index**2)}


def make_seeded(seed: int, count: int) -> tuple[Squares, Squares]:
    return Squares(count), Squares(seed)


def make_iterator() -> Iterator[int]:
    return iter(range(3))


def make_trouble() -> Squares:
    raise OSError("no disk")


HERE = __name__


def open_path(config: Any, name: str, **kwargs: Any) -> DataBundle:
    return open_dataset(config(path=f"{HERE}:{name}", kwargs=kwargs), seed=3)


def test_a_users_dataset_gets_torchs_collate(config: Any) -> None:
    bundle = open_path(config, "Squares", count=4)
    assert bundle.evaluation is None
    assert (bundle.vocab_size, bundle.sequence_length, bundle.fingerprint) == (11, None, None)
    batch = bundle.train.collate([bundle.train[2], bundle.train[3]])
    assert batch["y"].tolist() == [4, 9]


def test_a_pair_is_training_and_evaluation_and_the_seed_is_passed(config: Any) -> None:
    bundle = open_path(config, "make_seeded", count=7)
    assert bundle.evaluation is not None
    assert (len(bundle.train), len(bundle.evaluation)) == (7, 3)
    bundle = open_path(config, "make_seeded", count=7, seed=5)
    assert bundle.evaluation is not None
    assert len(bundle.evaluation) == 5


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("missing", {}, "no 'missing' in"),
        ("HERE", {}, "expected a callable"),
        ("Squares", {"size": 1}, "unexpected keyword argument 'size'"),
        ("Squares", {"count": 0}, "returned a Squares without samples"),
        ("Squares", {"count": -1}, r"len\(\) failed: ValueError"),
        ("make_iterator", {}, "expected a map-style dataset"),
        ("make_trouble", {}, "failed: OSError: no disk"),
    ],
)
def test_a_users_mistake_is_one_line(
    config: Any, name: str, kwargs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=f"data.path: .*{expected}") as caught:
        open_path(config, name, **kwargs)
    assert "\n" not in str(caught.value)
