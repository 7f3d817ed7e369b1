"""What may not change while a run goes on, and what is said of it."""

from typing import Any

import pytest

from elastic_ft.config import parse_job
from elastic_ft.core.terms import (
    JOB_KEYS,
    NOTED_KEYS,
    changes,
    data_terms,
    noted,
    refusal,
    terms_of,
    terms_of_manifest,
)

JOB: dict[str, Any] = {
    "name": "tiny",
    "steps": 10,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:"},
    "batch": {"global_batch_size": 16},
}


def terms(**sections: Any) -> dict[str, Any]:
    values = {k: v if k not in sections else v | sections[k] for k, v in JOB.items() if k != "seed"}
    scalars = {k: v for k, v in sections.items() if not isinstance(v, dict)}
    added = {k: v for k, v in sections.items() if k not in JOB}
    return terms_of(parse_job(values | added | scalars).model_dump(mode="json"))


def test_every_term_is_a_key_of_the_job_file() -> None:
    assert terms().keys() == {*JOB_KEYS, *NOTED_KEYS}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        pytest.param(
            {"batch": {"global_batch_size": 32}},
            "batch.global_batch_size was 16, is 32: samples 160 to 319 of the data order would "
            "be skipped; --accept-changes goes on from step 10 (u) all the same",
            id="more",
        ),
        pytest.param(
            {"batch": {"global_batch_size": 8}}, "samples 80 to 159 of the data order would be rep"
        ),
        pytest.param({"seed": 7}, "seed was 0, is 7: the data order is another"),
        pytest.param({"data": {"sequence_length": 128}}, "the samples are others"),
        pytest.param({"optimizer": {"betas": [0.8, 0.9]}}, "betas was [0.9, 0.95], is [0.8, 0.9]"),
        pytest.param({"optimizer": {"weight_decay": 0.3}}, "weight_decay was 0.1, is 0.3: the opt"),
    ],
)
def test_a_change_is_refused_in_words(now: dict[str, Any], said: str) -> None:
    assert said in refusal(changes(terms(), terms(**now)), 10, "u")


def test_what_may_change_is_told() -> None:
    later = terms(steps=20, optimizer={"lr": 0.1}, batch={"micro_batch_size": 2})
    assert changes(terms(), later) == ()
    assert {change.key for change in noted(terms(), later)} == {
        "steps",
        "optimizer.lr",
        "batch.micro_batch_size",
    }


def test_data_is_compared_as_far_as_it_is_known() -> None:
    before = data_terms(100, "abc")
    assert changes(before, data_terms(100, "abc")) == changes(before, data_terms(100, None)) == ()
    assert [change.key for change in changes(before, data_terms(101, "abd"))] == [
        "data.samples",
        "data.fingerprint",
    ]


@pytest.mark.parametrize("extra", [{}, {"seed": 3}, {"terms": None}, {"terms": [1]}])
def test_an_older_manifest_has_no_terms(extra: dict[str, Any]) -> None:
    assert changes(terms_of_manifest(extra), terms()) == ()


def test_terms_of_another_type_differ() -> None:
    odd = terms_of_manifest({"terms": {"batch.global_batch_size": "many", "seed": [0]}})
    assert "batch.global_batch_size was many, is 16" in refusal(changes(odd, terms()), 3, "u")
