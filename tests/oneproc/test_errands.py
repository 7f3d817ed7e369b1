"""What a thread does for one that must not wait: one after another, and none ends the others."""

from __future__ import annotations

import threading

import pytest

from elastic_ft.controller.errands import Errands

DEADLINE_S = 60.0


def test_an_errand_that_raises_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Who owns a checkpoint URL is never looked at again otherwise, and no checkpoint deleted."""
    errands, done = Errands("errands"), threading.Event()

    def raises() -> None:
        raise KeyError("odd")

    errands.submit(raises)
    errands.submit(done.set)
    assert errands.close(DEADLINE_S)
    assert done.is_set()
    assert "KeyError: 'odd'" in caplog.text


def test_what_was_not_begun_is_dropped_and_what_hangs_is_left() -> None:
    errands, begun, goes_on, done = Errands("errands"), *(threading.Event() for _ in range(3))

    def hangs() -> None:
        begun.set()
        assert goes_on.wait(DEADLINE_S)

    errands.submit(hangs)
    assert begun.wait(DEADLINE_S)
    errands.submit(done.set)
    errands.drop()
    assert not errands.close(0.0)
    goes_on.set()
    assert errands.close(DEADLINE_S)
    assert not done.is_set()
