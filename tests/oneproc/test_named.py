"""Metrics that a model or a step's function names: sums and counts, over micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.cli.check_model import check_model_and_data
from elastic_ft.config import Job, parse_job
from elastic_ft.engines.base import MicroBatch
from elastic_ft.errors import ConfigError, ModelError
from elastic_ft.models.loss import loss_and_named
from elastic_ft.models.named import NamedSums
from elastic_ft.observe.run_folder import read_lines
from tests.oneproc.alone import attached, job_of, reach
from tests.oneproc.own_loops import Own
from tests.oneproc.test_train_loop import run_job_here

SAMPLES, SIZE, BATCH, STEPS = 40, 3, 8, 3


class Points:
    """Of two classes; a micro-batch has as many as it has."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "label": torch.tensor(index % 2)}


class Classifier(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.linear, self.wrong = nn.Linear(4, 2), wrong

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> Any:
        logits = self.linear(x)
        loss = nn.functional.cross_entropy(logits, label, reduction="sum")
        right = (logits.argmax(-1) == label).sum()
        if self.wrong == "mean":
            return loss / len(label)
        if self.wrong == "plain":
            return loss, len(label), {"accuracy": right / len(label)}
        ones = (logits.exp().sum().detach(), logits.numel())
        return loss, len(label), {"accuracy": (right, len(label)), "scale": ones}


def points() -> tuple[Points, Points]:
    return Points(), Points()


def classifier(wrong: str = "") -> nn.Module:
    return Classifier(wrong)


def micro_batch(*indices: int) -> dict[str, torch.Tensor]:
    samples = [Points()[index] for index in indices]
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def test_micro_batches_of_unequal_size_weigh_by_what_they_count() -> None:
    ranks = [NamedSums(), NamedSums()]
    ranks[0].add({"accuracy": (torch.tensor(1), 4)})
    ranks[0].add({"accuracy": (torch.tensor(math.nan), 4)}, weight=0.0)  # padding
    ranks[1].add({"accuracy": (2, 2)})
    summed = [sum(pair) for pair in zip(*(rank.sums() for rank in ranks), strict=True)]
    assert ranks[0].means(summed) == ranks[1].means(summed) == {"accuracy": 0.5}
    ranks[0].begin()
    assert ranks[0].sums() == [0.0, 0.0] and ranks[0].means([0.0, 0.0]) == {}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (torch.ones(()), "returned a tensor of shape (); expected (sum of losses"),
        ({"loss": 1}, "returned dict; expected (sum of losses"),
        ((torch.ones(2), 2), "returned a tensor of shape (2,) as the sum of losses"),
        ((1.0, 2), "returned 1.0 as the sum of losses, expected a scalar tensor"),
        ((torch.ones(()), None), "returned None as the count"),
        ((torch.ones(()), 2, [1]), "expected named metrics as {name: (sum, count)}"),
        ((torch.ones(()), 2, {"a": torch.ones(())}), "found a: a tensor of shape ()"),
        ((torch.ones(()), 2, {"a": (1, torch.ones(2))}), "found a: (1, a tensor of shape (2,))"),
        ((torch.ones(()), 2, {3: (1, 2)}), "found the name 3"),
        ((torch.ones(()), 2, {}, 4), "returned 4 values; expected (sum of losses"),
    ],
)
def test_what_a_model_must_not_return_is_said_with_what_was_expected(
    output: Any, said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        loss_and_named(lambda x: output, {"x": 1})  # type: ignore[arg-type]
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_sums_what_its_model_names() -> None:
    sections = {"model": {"path": f"{__name__}:classifier"}, "data": {"path": f"{__name__}:points"}}
    with attached(job_of(**sections), classifier) as engine:
        parts = [micro_batch(0, 1, 2), micro_batch(3)]
        engine.run_batch(1, [MicroBatch(n, part) for n, part in enumerate(parts)], reach)
        trained = engine.named.means(engine.named.sums())
        *_, named = engine.evaluate([MicroBatch(0, micro_batch(0, 1, 2, 3))])
        whole = named.means(named.sums())
    assert trained == pytest.approx(whole) and sorted(whole) == ["accuracy", "scale"]


def job(**more: Any) -> Job:
    values: dict[str, Any] = {
        "name": "named",
        "steps": STEPS,
        "model": {"path": f"{__name__}:classifier"} | more,
        "data": {"path": f"{__name__}:points", "eval_every_steps": STEPS, "eval_samples": 7},
        "batch": {"global_batch_size": BATCH, "micro_batch_size": SIZE - 1},
        "elastic": {"min_workers": 1, "max_workers": 1},
    }
    return parse_job(values)


def test_they_are_in_the_steps_lines_and_in_the_journal(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    result = run_job_here(tmp_path, job(), lambda step: seen.append(dict(step.metrics)))
    assert result["status"] == "completed", result
    lines = [line["metrics"] for line in read_lines(tmp_path / "steps.jsonl")]
    assert lines == seen and len(lines) == STEPS
    assert all(line["accuracy"] * BATCH == round(line["accuracy"] * BATCH) for line in lines)
    (line,) = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "evaluated"]
    assert line["metrics"]["accuracy"] * 7 == pytest.approx(round(line["metrics"]["accuracy"] * 7))


def test_a_model_that_returns_something_else_ends_the_job_at_once(tmp_path: Path) -> None:
    result = run_job_here(tmp_path, job(kwargs={"wrong": "mean"}), lambda step: None)
    assert result["status"] == "failed" and result["steps"] == 0
    assert "the model returned a tensor of shape (); expected (sum of losses" in result["reason"]
    events = [line["event"] for line in read_lines(tmp_path / "events.jsonl")]
    assert events.count("generation_formed") == 1, "told once"


@pytest.mark.parametrize("wrong", ["mean", "plain"])
def test_it_is_found_before_anything_starts_where_the_model_runs_without_weights(
    wrong: str,
) -> None:
    check_model_and_data(job())
    with pytest.raises(ModelError, match=r"model.path: .*expected"):
        check_model_and_data(job(kwargs={"wrong": wrong}))


def test_a_loop_gives_them_with_each_micro_batch_or_with_none() -> None:
    own = Own("ddp")
    data = [torch.arange(6), torch.arange(6) + 3]
    with own.generation():
        running = own.running(1, data)
        for number, micro in enumerate(own.engine.micro_batches(running)):
            loss = own.model(micro.data).sum()
            own.engine.backward(loss, 6, {"mean": (loss, 6)} if number else None)
        with pytest.raises(ConfigError, match="1 of 2 micro-batches came with named metrics"):
            own.optimizer.step()
        running = own.running(1, data)
        for micro in own.engine.micro_batches(running):
            loss = own.model(micro.data).sum()
            with pytest.raises(ModelError, match="expected named metrics"):
                own.engine.backward(loss, 6, {"mean": loss})
            own.engine.backward(loss, 6, {"mean": (loss, 6)})
        own.optimizer.step()
        own.engine.end_attempt()
        assert [*own.engine.named.means(own.engine.named.sums())] == ["mean"]
