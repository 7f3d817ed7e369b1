"""How many terms losses had, whatever a model counts with."""

from __future__ import annotations

import pytest
import torch

from elastic_ft.engines.modules import TermCounts


@pytest.mark.parametrize(
    ("dtype", "count", "times"),
    [(torch.uint8, 200, 4), (torch.float16, 2047, 40), (torch.float32, 8191, 4096)],
)
def test_counts_add_up_in_any_dtype(dtype: torch.dtype, count: int, times: int) -> None:
    terms = TermCounts()
    for _ in range(times):
        terms.add(torch.tensor(count, dtype=dtype))
    terms.add(3)
    assert terms.total() == count * times + 3


def test_a_count_that_the_model_fills_in_place_is_read_when_it_is_told() -> None:
    terms, buffer = TermCounts(), torch.zeros((), dtype=torch.int64)
    for count in (5, 7, 9):
        terms.add(buffer.fill_(count))
    assert terms.total() == 21
