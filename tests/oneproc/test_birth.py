"""What a worker says of its start, whoever it was forked from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_ft.worker import birth


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time. Nothing was passed by now, and what is, is forgotten."""
    now = [100.0]
    monkeypatch.setattr(birth, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(birth, "_since_s", now[0])
    monkeypatch.setattr(birth, "_spent", {})
    return now


def test_a_worker_that_is_wanted_late_has_not_imported_all_the_while(clock: list[float]) -> None:
    clock[0] += 3.0
    birth.passed("imports_s")  # of the process that it is forked from
    clock[0] += 200.0
    birth.forked()
    clock[0] += 0.5
    birth.passed("imports_s")
    clock[0] += 0.25
    birth.passed("connect_s")
    assert birth.spent() == {"imports_s": 3.5, "connect_s": 0.25}


def test_what_was_imported_for_nobody_yet_took_nobodys_time(clock: list[float]) -> None:
    clock[0] += 200.0
    birth.begin_again()
    clock[0] += 0.5
    birth.passed("imports_s")
    assert birth.spent() == {"imports_s": 0.5}
