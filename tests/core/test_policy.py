"""What the job file and the policy both have is copied by name, and rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core.policy import Policy, same_names


@dataclass
class Section:
    spares: int = 3
    unknown: int = 1


def test_fields_of_the_same_name_are_copied() -> None:
    assert same_names(Policy, Section()) == {"spares": 3}


def test_two_sections_may_not_say_the_same() -> None:
    with pytest.raises(ValueError, match="spares: given by two sections"):
        same_names(Policy, Section(), Section())


@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 9))
def test_limits_in_multiples_allow_the_same_worlds(least: int, more: int, each: int) -> None:
    policy = Policy(least, least + more, multiple_of=each)
    rounded = policy.in_multiples()
    assert rounded.min_workers % each == rounded.max_workers % each == 0
    worlds = set(range(0, 150, each))
    before = {n for n in worlds if policy.min_workers <= n <= policy.max_workers}
    assert {n for n in worlds if rounded.min_workers <= n <= rounded.max_workers} == before
