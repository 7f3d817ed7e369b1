"""What a plan says of itself is true: each sentence against all choices, one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, inf

import pytest

from elastic_ft.core.layouts.layout_plan import NoLayout
from elastic_ft.core.layouts.plan_words import features
from elastic_ft.core.layouts.planner import NEAR, Limits, best
from elastic_ft.core.layouts.work import Choice, Work
from tests.core.shapes import SMALL, devices
from tests.core.test_planner import everything, random_case

# 54 and 75: what is not worth trying, without a feature, is better than all that was tried.
SEEDS = (*range(16), 37, 54, 75)


@pytest.mark.parametrize("seed", SEEDS)
def test_doing_without_a_feature_costs_what_is_said(seed: int) -> None:
    work, there, limits = random_case(seed, most=12)
    try:
        plan = best(work, there, limits)
    except NoLayout:
        return
    tried = [*everything(work, there, limits)]
    for feature in (feature for feature, has in features(plan.choice).items() if has):
        (said,) = (words for words in plan.why if words.startswith(f"{feature}: "))
        without_s = min((s for choice, s in tried if not features(choice)[feature]), default=inf)
        check_without(said, without_s / plan.time.total - 1)
    faster = [choice for choice, s in tried if s * NEAR < plan.time.total]
    more = [choice for choice in faster if choice.layout.world_size > plan.layout.world_size]
    assert not more or "no layout of more devices that fits is over 3% faster" not in plan.why


def check_without(said: str, slower: float) -> None:
    """``slower``: how much without it; infinite where nothing fits."""
    if found := re.search(r"at least (\d+)% slower(, if it fits)?$", said):
        assert slower >= int(found[1]) / 100 - 0.006, said
        assert found[2] or slower < inf, said
    elif found := re.search(r"without it (\d+)% (slower|faster)$", said):
        assert slower * (1 if found[2] == "slower" else -1) == pytest.approx(
            int(found[1]) / 100, abs=0.006
        ), said
    else:
        assert slower == inf, said


@pytest.mark.parametrize("seed", [1, 6, 11, 32])
def test_as_many_micro_batches_in_a_row_are_as_many(seed: int) -> None:
    work, there, limits = random_case(seed, most=12)
    plan = best(work, there, limits)
    said = [words for words in plan.why if "as many micro-batches in a row" in words]
    assert any(plan.idle)
    dp, count = plan.layout.data_parallel_size, micro_batches(work, plan.choice)
    copies = sum(plan.nodes) * dp // plan.layout.world_size
    as_many = ceil(count / min(copies, count)) == ceil(count / dp)
    assert bool(said) is as_many, plan.why


def micro_batches(work: Work, choice: Choice) -> int:
    return work.global_batch // choice.micro_batch


def test_who_is_idle_for_a_multiple_s_sake_is_told_so() -> None:
    work, limits = Work(SMALL, 64), replace(Limits(), multiple_of=4)
    plan = best(work, devices(7), limits)
    assert plan.layout.world_size == 4
    assert "worlds are multiples of 4" in plan.why
