"""Every seed that a job file may have seeds everything."""

from __future__ import annotations

import pytest
import torch

from elastic_ft.config import parse_job
from elastic_ft.config.section import SEED_MAX
from elastic_ft.core.batches import DataOrder
from elastic_ft.engines.modules import seed_for
from elastic_ft.errors import ConfigError
from elastic_ft.models import Decoder, DecoderConfig, initial_state

TINY = DecoderConfig(11, 1, 4, 1, 1, 4, 8)


def job_with(seed: int) -> dict[str, object]:
    return {
        "name": "seeded",
        "seed": seed,
        "steps": 1,
        "model": {"preset": "decoder-1m"},
        "data": {"url": "stdlib:"},
    }


@pytest.mark.parametrize("seed", [0, 1_234_567_890, 2**32 - 1, 2**63, 2**64 - 1])
def test_a_seed_of_64_bits_is_a_seed(seed: int) -> None:
    assert parse_job(job_with(seed)).seed == seed
    drawn = set()
    for step, micro_batch in ((1, 0), (1, 1), (2, 0), (10**15, 10**9)):
        seed_for(seed, step, micro_batch)
        drawn.add(float(torch.rand((), dtype=torch.float64)))
    assert len(drawn) == 4
    for factory in (lambda: Decoder(TINY), lambda: torch.nn.Linear(3, 3)):
        assert all(tensor.isfinite().all() for _, tensor in initial_state(factory, seed))
    assert sorted(DataOrder(seed, 7).sample_ids(0, 7)) == list(range(7))


def test_more_bits_are_refused() -> None:
    assert SEED_MAX == 2**64 - 1
    with pytest.raises(ConfigError, match="seed: "):
        parse_job(job_with(2**64))


def test_seeds_that_worked_draw_what_they_drew() -> None:
    seed_for(42, 3, 1)
    found = torch.default_generator.initial_seed()
    assert found == (42 * 1_000_003 + 3) * 100_003 + 1
