"""The learning rate by the global step alone."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ft.config import OptimizerConfig
from elastic_ft.core.schedule import scheduled_rate

STEPS = 100


def rates(*steps: int, **keys: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=10, **keys)
    return [scheduled_rate(config, STEPS, step) for step in steps]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"schedule": "constant"}, [0.1, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [0.1, 1.0, 0.55, 0.1]),
        ({"schedule": "cosine"}, [0.1, 1.0, 0.55, 0.1]),
        ({"schedule": "wsd", "decay_steps": 20}, [0.1, 1.0, 1.0, 0.1]),
        ({"schedule": "inverse_sqrt"}, [0.1, 1.0, (10 / 55) ** 0.5, (10 / 100) ** 0.5]),
    ],
)
def test_rates_at_the_ends_and_between(keys: dict[str, Any], expected: list[float]) -> None:
    assert rates(1, 10, 55, STEPS, **keys) == pytest.approx(expected)


def test_wsd_falls_in_a_line_over_its_last_steps() -> None:
    found = rates(79, 80, 85, 90, schedule="wsd", decay_steps=20)
    assert found == pytest.approx([1.0, 1.0, 0.775, 0.55])
    assert rates(10, 55, 100, schedule="wsd", decay_steps=500) == pytest.approx([1.0, 0.55, 0.1])


def test_inverse_sqrt_stops_at_its_least() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.5, schedule="inverse_sqrt")
    assert [scheduled_rate(config, 9, step) for step in (1, 2, 9)] == pytest.approx(
        [1, 0.5**0.5, 0.5]
    )


def test_a_function_of_ones_own_has_what_comes_after_the_warm_up() -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=2, schedule="a.module:factor")
    found = [
        scheduled_rate(config, 8, step, lambda step, steps: step / steps) for step in (1, 2, 4)
    ]
    assert found == [1.0, 2.0, 1.0]


def test_past_its_end_a_run_has_the_last_rate() -> None:
    """One that goes on with fewer steps than it had."""
    assert rates(101, 500, schedule="cosine") == pytest.approx([0.1, 0.1])
