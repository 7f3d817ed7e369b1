"""What tensor and pipeline parallelism refuse, and that stages in a row are the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.controller.job_policy import policy_of
from elastic_ft.core.layouts.layout import stages_of
from elastic_ft.engines.pipeline import check_batch, check_pipeline, cut, micro_batches_to_run
from elastic_ft.engines.tensor_parallel import check_tensor_parallel
from elastic_ft.errors import ConfigError
from elastic_ft.models.decoder import Decoder, DecoderConfig
from tests.oneproc.alone import job_of

GIVEN: dict[str, str] = {}
NO_PLAN = 3
BATCH = {"global_batch_size": 40}
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "n_layers": 5,
    "dim": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 24,
    "max_sequence_length": 8,
}


def decoder(**changes: Any) -> Decoder:
    return Decoder(DecoderConfig(**(SIZES | changes)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zero_bubble"])
def test_stages_in_a_row_are_the_model(schedule: str) -> None:
    whole = decoder()
    tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(0))
    expected, names = whole(tokens), [name for name, _ in whole.named_parameters()]
    stages = {n: stage for rank in range(2) for n, stage in cut(whole, rank, 2, schedule).items()}
    assert sorted(stages) == sorted(n for rank in range(2) for n in stages_of(rank, 2, schedule))
    x = tokens
    for _, stage in sorted(stages.items()):
        stage.length = 8
        x = stage(x)
    assert torch.equal(x, expected)
    found = [name for stage in stages.values() for name, _ in stage.named_parameters()]
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize(
    ("tp", "length", "changes", "problem"),
    [
        (4, 8, {}, "4 does not divide the model's n_kv_heads 2"),
        (3, 8, {}, "3 does not divide the model's n_heads 4"),
        (2, 8, {"ffn_dim": 25}, "2 does not divide the model's ffn_dim 25"),
        (2, 7, {}, "2 does not divide the model's sequence length 7"),
    ],
)
def test_tensor_parallelism_refuses(
    tp: int, length: int, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"parallel.tp: {problem}"):
        check_tensor_parallel(decoder(**changes), tp, length)
    check_tensor_parallel(decoder(**changes), 1, length)


PLANS = {
    "unknown style": ({"0": "diagonal"}, "the plan has 0 diagonal; expected one of colwise"),
    "no module": ({"layers.*": "colwise"}, r"names layers\.\*, which matches no module"),
    "odd size": ({"0": "rowwise"}, "2 does not divide the model's 0 3"),
}


@pytest.mark.parametrize(("plan", "problem"), PLANS.values(), ids=PLANS)
def test_plans_that_do_not_fit_are_refused(
    plan: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.GIVEN", plan)
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ConfigError, match=problem):
        check_tensor_parallel(model, 2, 8, f"{__name__}:GIVEN")
    with pytest.raises(ConfigError, match=r"parallel.tp_plan: .* is int; expected a mapping"):
        check_tensor_parallel(model, 2, 8, f"{__name__}:NO_PLAN")


class Dropping(nn.Module):
    """As transformers has it: a rate by which attention drops."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout, self.line = rate, nn.Linear(2, 4)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1)), r"1\.p is 0\.1"),
        (nn.Sequential(Dropping(0.5)), r"0\.attention_dropout is 0\.5"),
    ],
)
def test_dropout_over_shared_activations_is_refused(
    model: nn.Module, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks draw the same numbers, for heads that are not the same."""
    monkeypatch.setattr(f"{__name__}.GIVEN", {"0": "colwise", "0.line": "colwise"})
    with pytest.raises(ConfigError, match=f"parallel.tp: {named}"):
        check_tensor_parallel(model, 2, 8, f"{__name__}:GIVEN")
    check_tensor_parallel(model, 1, 8, f"{__name__}:GIVEN")


def test_what_drops_nothing_is_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.GIVEN", {"0.line": "colwise"})
    model = nn.Sequential(Dropping(0.0), nn.Dropout(0.0))
    check_tensor_parallel(model, 2, 8, f"{__name__}:GIVEN")


@pytest.mark.parametrize(
    ("key", "batch", "found"),
    [
        ("cp", {"tokens": [], "attention_mask": []}, "found attention_mask in a batch"),
        ("pp", {"tokens": [], "token_type_ids": []}, "found token_type_ids in a batch"),
        ("pp", {"input_ids": []}, r"found \['input_ids'\]"),
        ("pp", ([], []), "found a tuple"),
    ],
)
def test_batches_that_are_not_of_tokens_are_refused(key: str, batch: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.{key}: .*{found}"):
        check_batch(batch, f"parallel.{key}")
    check_batch({"tokens": [], "labels": []}, f"parallel.{key}")


def test_stages_take_masks_and_a_tokenizers_batch() -> None:
    check_batch({"tokens": [], "attention_mask": [], "position_ids": []})
    check_batch({"input_ids": [], "attention_mask": [], "labels": []}, of_transformers=True)


def test_pipelines_refuse() -> None:
    with pytest.raises(ConfigError, match="need 6 stages, the model has 5 layers"):
        check_pipeline(decoder(), 3, "zero_bubble")
    check_pipeline(decoder(), 3, "gpipe")


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp: Linear has no plan"):
        check_tensor_parallel(nn.Linear(2, 2), 2, 8)
    with pytest.raises(ConfigError, match=r"parallel.pp: .* which Linear has not"):
        check_pipeline(nn.Linear(2, 2), 2, "1f1b")


@pytest.mark.parametrize(
    ("elastic", "parallel", "expected"),
    [
        ({}, {"tp": 2, "pp": 2}, (4, 4, 8)),  # neither is lowered unasked
        ({"multiple_of": 2}, {"tp": 2, "pp": 2}, (2, 2, 10)),
        ({"multiple_of": 1}, {"tp": 2}, (1, 2, 10)),
        ({}, {}, (1, 2, 10)),
        ({}, {"strategy": "auto"}, (1, 2, 10)),
    ],
)
def test_worlds_are_multiples_of_what_the_job_wants_whole(
    elastic: dict[str, Any], parallel: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    workers = {"min_workers": 2, "max_workers": 10}
    policy = policy_of(job_of(elastic=workers | elastic, parallel=parallel, batch=BATCH))
    assert (policy.multiple_of, policy.min_workers, policy.max_workers) == expected


@pytest.mark.parametrize(
    ("schedule", "dealt", "run"),
    [("gpipe", 1, 1), ("1f1b", 1, 2), ("1f1b", 5, 5), ("interleaved1f1b", 5, 6)],
)
def test_pipelines_run_as_many_micro_batches_as_they_need(
    schedule: str, dealt: int, run: int
) -> None:
    assert micro_batches_to_run(dealt, 2, schedule) == run


def test_stages_of_a_tied_model_share_its_embedding() -> None:
    whole = decoder(tie_embeddings=True)
    first, last = (cut(whole, rank, 2, "1f1b")[rank] for rank in range(2))
    assert first.embedding.weight is last.output.weight  # until each is given memory of its own
    assert "embedding.weight" not in dict(last.named_parameters())
