"""Found before anything starts: a model that does not take its data, and too little of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.cli.check_model import check_arguments, few_samples
from elastic_ft.config import parse_job
from elastic_ft.errors import ModelError


class Model(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None: ...


@pytest.mark.parametrize("batch", [{"x": 1, "y": 2}, {"y": 1, "x": 2, "scale": 3}, (1, 2), [1, 2]])
def test_what_forward_takes_is_given(batch: Any) -> None:
    check_arguments(Model(), batch)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": 1, "label": 2}, r"gives \(keys x, label\): missing .* 'y'"),
        ({"x": 1, "y": 2, "z": 3}, r"gives \(keys x, y, z\): got an unexpected .* 'z'"),
        (7, r"gives \(no keys\): missing .* 'y'"),
        ((1, 2, 3, 4), r"gives \(no keys\): too many positional"),
    ],
)
def test_what_it_does_not_take_is_named(batch: Any, why: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^forward\(x, y, scale\) does not take what the dataset {why}"
    ):
        check_arguments(Model(), batch)


def test_tokens_are_cut_before_a_model_sees_them() -> None:
    check_arguments(Model(), {"tokens": 1})
    check_arguments(Model(), {"tokens": 1, "labels": 2})


def test_a_batch_that_is_more_than_the_data_is_said() -> None:
    data = {"model": {"path": "a:b"}, "data": {"path": "a:c"}}
    job = parse_job({"name": "few", "steps": 1, **data, "batch": {"global_batch_size": 32}})
    assert few_samples(job, 32) == ()
    (warning,) = few_samples(job, 31)
    assert warning.startswith("batch.global_batch_size: 32 is more than the 31 training samples")
