"""Plain variables that a loop carries from step to step, and nobody has registered, are told."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.training.carried import Flow, carried_by_loop
from elastic_ft.training.forgotten import Forgotten
from elastic_ft.training.variables import running_frames

CASES = [
    ("step += 1", {"step"}),
    ("loss = f(x); total = total + loss", {"total"}),
    ("total = 0\nfor x in xs:\n    total += x", set()),
    ("for x in xs:\n    total = 0\nshow(total)", {"total"}),
    ("if loss < best:\n    best, bad = loss, 0\nelse:\n    bad += 1", {"best", "bad"}),
    ("if a:\n    y = 1\nelse:\n    y = 2\nshow(y)", set()),
    ("if a:\n    y = 1\nshow(y)", {"y"}),
    ("try:\n    y = f()\nexcept E:\n    y = 1\nshow(y)", {"y"}),
    ("while n < 3:\n    n = g(n)", {"n"}),
    ("if (n := n + 1) > 3:\n    stop()", {"n"}),
    ("self.step += 1; show(self.step)", {"self.step"}),
    ("old: float = new\nnew = f(old)", {"new"}),
    ("with a as b:\n    show(b)", set()),
    ("@each\ndef step(x):\n    nonlocal n\n    n += 1; own = x; own += n", {"n"}),
    ("@each\ndef step(x):\n    self.n += 1", {"self.n"}),
    ("key = lambda: later\nlater = 1", set()),
    ("rows = [r for r in rows]", {"rows"}),
]


@pytest.mark.parametrize(("body", "carried"), CASES)
def test_what_a_pass_reads_before_it_sets_it_is_carried(body: str, carried: set[str]) -> None:
    assert Flow(ast.parse(body).body).carried == carried


def looked(told: list[str], forgotten: Forgotten, known: Any, *names: str) -> None:
    told += forgotten.carried(running_frames(), known, names)


def steps(told: list[str], known: Any, *names: str) -> Iterator[int]:
    """As a loader: it looks after each step."""
    forgotten = Forgotten()
    for number in range(4):
        yield number
        looked(told, forgotten, known, *names)


def trained(known: list[Any], state: Any, *names: str) -> list[str]:
    told, step, best, patience, rate = list[str](), 0, 9.0, 0, 0.1
    began = time.time()
    for _ in range(1):
        total = 0.0
        for number in steps(told, known, *names):
            total += number
            step += 1
            state.count += 1
            rate = rate if total > 1e9 else 0.1
            best = min(best, 5.0 - number)
            began = max(began, time.time())
        patience += 1  # noqa: SIM113
    return told


def test_what_a_loop_carries_is_told_once_by_name() -> None:
    told = trained([SimpleNamespace(nothing=None)], SimpleNamespace(count=0))
    assert [line.split()[0] for line in told] == ["best", "state.count", "step"]
    assert 'begins it anew: ctx.prepare("step"), if all ranks have the same' in told[2]
    assert "keep it in an object of its own, for ctx.register" in told[1]


def test_what_is_registered_is_not_told() -> None:
    state = SimpleNamespace(count=0)
    assert trained([state], state, "step", "best") == []


class Trainer:
    """Its step stands elsewhere than its loop."""

    def __init__(self) -> None:
        self.updates, self.forgotten = 0, Forgotten()
        self.forgotten.begin(self.train_step, [])

    def train_step(self) -> None:
        self.updates += 1

    def fit(self) -> list[str]:
        told = list[str]()
        for _ in range(3):
            self.train_step()
            looked(told, self.forgotten, [])
        return told


def test_a_methods_count_is_told() -> None:
    (told,) = Trainer().fit()
    assert told.startswith("self.updates (2) is carried from step to step")


def test_a_body_in_no_loop_is_one() -> None:
    found = list[Any]()

    def each(function: Any) -> Any:
        frame = sys._getframe(1)
        found.append(carried_by_loop(frame.f_code, frame.f_lineno)[0])
        return function

    count = 0

    @each
    def step(x: Any) -> None:
        nonlocal count
        count += 1

    assert found == [{"count"}]
