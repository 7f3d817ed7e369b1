"""What a script sets on its dataset is seen: of whatever kind, and whoever has set it before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.data.settings import (
    changed_settings,
    put_settings,
    settings_of,
    to_be_told,
)


class Plain:
    """Of all kinds, each with a value that has an effect."""

    def __init__(self) -> None:
        self.weights = torch.tensor([1.0, 0.0])
        self.shares = np.array([0.5, 0.5])
        self.order = list(range(100))
        self.rows = torch.zeros(5000)
        self.table = np.zeros(100_000)
        self.parts = [torch.zeros(2), torch.zeros(5000)]


class Slotted:
    __slots__ = ("level", "unset")

    def __init__(self) -> None:
        self.level = 0


class Above(Slotted):
    __slots__ = ("more",)

    def __init__(self) -> None:
        super().__init__()
        self.more = 0


def _new(name: str) -> Callable[[Any], None]:
    return lambda thing: setattr(thing, name, copy.deepcopy(getattr(thing, name)) * 2)


def _at(name: str, place: int) -> Callable[[Any], None]:
    return lambda thing: getattr(thing, name).__setitem__(place, 7)


CHANGES = {
    "a small tensor": lambda thing: setattr(thing, "weights", torch.tensor([0.5, 0.5])),
    "a small tensor's value": _at("weights", 1),
    "a small tensor in a list": lambda thing: thing.parts[0].add_(1),
    "a small array's value": _at("shares", 1),
    "a long list's item": _at("order", 50),
    "a long list": _new("order"),
    "a large tensor": lambda thing: setattr(thing, "rows", torch.zeros(5000)),
    "a large tensor's value": _at("rows", 4000),
    "a large tensor in a list": lambda thing: thing.parts[1].add_(1),
    "a large array": _new("table"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    thing = Plain()
    before = settings_of(thing)
    assert changed_settings(before, settings_of(thing)) == frozenset()
    CHANGES[what](thing)
    assert len(changed_settings(before, settings_of(thing))) == 1


def test_slots_are_seen_and_set() -> None:
    thing, elsewhere = Above(), Above()
    before = settings_of(thing)
    thing.level, thing.more = 3, 4
    now = settings_of(thing)
    assert changed_settings(before, now) == {("level",), ("more",)}
    put_settings(elsewhere, now)
    assert (elsewhere.level, elsewhere.more) == (3, 4)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_made_elsewhere_too(what: str) -> None:
    """As in a reading process, that was forked before."""
    thing, elsewhere = Plain(), Plain()
    before = settings_of(thing)
    CHANGES[what](thing)
    now = settings_of(thing)
    told = to_be_told(now, changed_settings(before, now))
    assert len(told) == 1
    put_settings(elsewhere, told)
    for name, value in vars(thing).items():
        found = getattr(elsewhere, name)
        for one, other in zip(value, found, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), name


def test_what_is_no_number_has_not_changed() -> None:
    thing = Plain()
    thing.weights[1] = thing.shares[1] = math.nan
    before = settings_of(thing)
    assert changed_settings(before, settings_of(thing)) == frozenset()
    thing.weights[0] = math.nan
    assert changed_settings(before, settings_of(thing)) == {("weights",)}


class Lazy:
    """Its first reading makes what it has not been given; each one counts."""

    def __init__(self) -> None:
        self.scale: int | None = None
        self.count = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.count += 1
        if self.scale is None:
            self.scale = 1
        return index * self.scale

    def collate(self, samples: list[int]) -> list[int]:
        return samples


def test_what_reading_has_set_once_may_be_the_scripts() -> None:
    """It was taken for reading's own for ever: a curriculum had no effect, without a word."""
    data = Lazy()
    with Prefetcher(data) as prefetcher:
        for step in range(1, 4):
            prefetcher.request(step, [(step,)])
            assert [read.data for read in prefetcher.get(step)] == [[step]]
            assert not prefetcher.renew()
        data.scale = 10
        assert prefetcher.renew()
        assert [read.data for read in prefetcher.get(3)] == [[30]]
        for step in range(4, 7):
            prefetcher.request(step, [(step,)])
            assert [read.data for read in prefetcher.get(step)] == [[10 * step]]
            assert not prefetcher.renew(), step
