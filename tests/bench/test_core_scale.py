"""The benchmark of the core runs, and what it counts is what the documents claim."""

from __future__ import annotations

import pytest

from benchmarks.core_scale import PHASES, life
from elastic_ft.core.layouts.layout import Strategy


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_life_is_whole_and_each_is_sent_little(strategy: Strategy) -> None:
    found = life(24, strategy, 60.0, profile=False)
    assert [name for name in PHASES if name in found["phases"]]
    assert found["committed"] > 0
    assert found["pause_bytes"] < 200 and found["assignment_bytes"] < 600
