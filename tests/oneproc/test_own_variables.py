"""Plain variables of a script that are prepared by their names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from elastic_ft.engines.own_state import OwnState
from elastic_ft.errors import ConfigError
from elastic_ft.training.loader import Loader
from elastic_ft.training.variables import Variable, running_frames
from tests.oneproc.test_own_arguments import context, samples

count = 3  # of this module


def kept(frame: FrameType, *names: str) -> OwnState:
    state = OwnState(4096)
    for name in names:
        state.register(name, Variable(frame, name))
    state.capture()
    return state


def test_a_functions_variables_are_put_back_where_it_goes_on() -> None:
    best, patience, history, weights = 2.5, 1, [1.0], torch.ones(300)
    state = kept(sys._getframe(), "best", "patience", "history", "weights")

    def worse() -> None:
        nonlocal patience
        patience += 1
        history.append(3.0)

    worse()
    best, weights, other = 0.0, torch.zeros(300), 7
    state.put_back()
    assert (best, patience, history, other) == (2.5, 1, [1.0], 7) and weights.sum() == 300
    worse()
    assert (patience, history) == (2, [1.0, 3.0]), "the inner function has the same"
    state.capture()
    best = float("nan")
    state.put_back()
    assert (best, patience) == (2.5, 2)


def test_a_modules_variables_are_put_back() -> None:
    global count
    state = kept(sys._getframe(), "count")
    count += 1
    state.put_back()
    assert count == 3


def test_a_scripts_own_code_has_its_variables_where_its_functions_do() -> None:
    script = "best = 1.0\nstate = kept(sys._getframe(), 'best')\nbest = 2.0\nstate.put_back()\n"
    names: dict[str, Any] = {"kept": kept, "sys": sys}
    exec(script, names)
    assert names["best"] == 1.0


def test_what_is_no_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'bets' is no variable of test_what_is_no_variable"):
        Variable(sys._getframe(), "bets")


def test_one_that_is_gone_is_told() -> None:
    best = 1.0
    state = kept(sys._getframe(), "best")
    del best
    with pytest.raises(ConfigError, match=r"'best' of test_one_that_is_gone_is_told has no"):
        state.capture()


def test_a_variable_of_a_function_that_has_returned_is_refused() -> None:
    """Nobody would read what is put back there."""

    def setup() -> Variable:
        best = 1.0  # noqa: F841
        found = Variable(sys._getframe(), "best")
        found.check_runs(running_frames())
        return found

    with pytest.raises(ConfigError, match=r"'best' was a variable of setup, which has returned"):
        setup().check_runs(running_frames())


def test_variables_are_prepared_by_name() -> None:
    """Beside what is returned, or alone."""
    ctx, model, best, step = context(), nn.Linear(1, 1), 1.0, 0
    assert ctx.prepare("best", model) is model
    ctx.prepare("step")
    _, loader = ctx.prepare(SGD(model.parameters()), samples())
    assert ctx._own is not None and isinstance(loader, Loader)
    own = ctx._own.engine.own
    assert own.names == ["best", "step"]
    ctx._begin()
    own.capture()
    best, step = 2.0, 1
    own.put_back()
    assert (best, step) == (1.0, 0)
    with pytest.raises(ConfigError, match=r"ctx.prepare: comes after the first batch"):
        ctx.prepare("model")
