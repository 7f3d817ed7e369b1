"""Deadlines: small worlds have what is configured, large ones and large states more."""

from __future__ import annotations

import pytest

from elastic_ft.core.deadlines import form_s, meet_s, pause_s, save_s, upload_s


@pytest.mark.parametrize("workers", [1, 8, 128])
def test_small_worlds_have_what_is_configured(workers: int) -> None:
    assert form_s(60.0, workers) == 60.0
    assert meet_s(60.0, workers) == 10.0
    assert pause_s(10.0, workers) == 10.0


def test_thousands_have_more_and_meet_while_there_is_time() -> None:
    for workers in (1024, 4096):
        assert form_s(60.0, workers) > 100.0
        assert 50.0 < meet_s(60.0, workers) < form_s(60.0, workers) - 49.0
        assert pause_s(10.0, workers) > 14.0


@pytest.mark.parametrize(("form_timeout_s", "met_s"), [(1800.0, 10.0), (60.0, 10.0), (6.0, 6.0)])
def test_who_is_gone_is_not_waited_for_as_long_as_a_state_is(
    form_timeout_s: float, met_s: float
) -> None:
    assert meet_s(form_timeout_s, 8) == met_s


def test_a_large_shard_has_time_to_be_uploaded_at_the_rate_it_may() -> None:
    assert upload_s(0, None) == 600.0
    assert upload_s(52 << 30, None) > 5000.0
    assert upload_s(52 << 30, 5e6) > (52 << 30) / 5e6


def test_keepers_have_time_to_save_what_they_have_until_they_give_up_themselves() -> None:
    assert save_s(0, 1800.0) == 60.0
    assert save_s(8 << 30, 1800.0) > (8 << 30) / 10e6
    assert save_s(1 << 40, 1800.0) == 1800.0
    assert save_s(0, 5.0) == 60.0
