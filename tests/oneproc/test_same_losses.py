"""Whether ranks make the same loss of one micro-batch, and which of them does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.config import parse_job
from elastic_ft.core.batches import job_order
from elastic_ft.errors import ConfigError, GroupBroken, ScriptDiffers
from elastic_ft.worker import same_losses
from elastic_ft.worker.planned import StepPlan
from elastic_ft.worker.same_losses import (
    TOLERANCE,
    Compared,
    check_same_losses,
    odd_ranks,
    shown,
    told,
)

MOST = TOLERANCE["cpu"]


def verdict(
    losses: list[float | None],
    known: set[int],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    again: float | None = None,
) -> None:
    """As ``rank`` hears it, of what all have told. ``again``: rank 0's, made a second time."""
    made = [Compared(loss, again if r == 0 else None) for r, loss in enumerate(losses)]
    said = [told(one) for one in made]
    everyones = [shown(one, r, len(losses), r in known) for r, one in enumerate(made)]
    summed = [sum(column) for column in zip(*everyones, strict=True)]
    monkeypatch.setattr(same_losses, "sum_over_members", lambda values, world: summed)
    place = (rank, len(losses), rank in known, 8, torch.device("cpu"))
    total = [sum(column) for column in zip(*said, strict=True)]
    check_same_losses(made[rank], total, *place, lambda: None)


@pytest.mark.parametrize("rank", [0, 8])
def test_what_rounding_alone_tells_apart_is_the_same(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are within the tolerance of each other, and their spread is not: each generation broke
    off, without end."""
    losses: list[float | None] = [1.0] * 5 + [1 + 0.9 * MOST] * 4
    verdict(losses, set(range(9)), rank, monkeypatch)


def test_who_came_in_without_what_others_have_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float | None] = [1.5, 1.0, None, 1.0]
    with pytest.raises(ScriptDiffers, match=r"1 on one rank and 1\.5 on another at step 8"):
        verdict(losses, {1, 3}, 0, monkeypatch)
    for rank in (1, 2, 3):
        with pytest.raises(GroupBroken):
            verdict(losses, {1, 3}, rank, monkeypatch)


@pytest.mark.parametrize("known", [{0, 1}, set[int]()])
def test_where_those_differ_who_made_the_steps_the_script_is_at_fault(
    known: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        with pytest.raises(ConfigError):
            verdict([1.0, 1.5], known, rank, monkeypatch)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_loss_that_is_no_number_is_another(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank alone it was not compared, and was in the gradient of all."""
    expected = ScriptDiffers if rank == 2 else GroupBroken
    with pytest.raises(expected, match="1 on one rank and nan on another"):
        verdict([1.0, 1.0, math.nan], {0, 1}, rank, monkeypatch)


def test_where_none_is_a_number_all_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        verdict([math.nan, math.nan], {0, 1}, rank, monkeypatch, again=math.nan)


@pytest.mark.parametrize("known", [{0, 1}, {1}, set[int]()])
@pytest.mark.parametrize("again", [1.5, math.nan])
def test_a_loss_that_is_another_the_second_time_is_the_scripts_fault(
    known: set[int], again: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has come in: of what ranks are dealt, or of what was before."""
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=f"1, and {again:g} when .* in step 8.*gathered over"):
            verdict([1.0, 1.0], known, rank, monkeypatch, again)


def test_the_usual_loss_is_no_single_ranks() -> None:
    assert odd_ranks({0: 2.0, 1: 1.0, 2: 1.0}, {0, 1, 2}, MOST) == {0}
    assert odd_ranks({0: 2.0, 1: 1.0, 2: 1.0}, set(), MOST) == {0}
    assert odd_ranks({0: 0.0, 1: 0.5 * MOST * same_losses.FLOOR}, set(), MOST) == set()


def test_all_ranks_have_as_many_micro_batches_where_losses_are_compared(tmp_path: Path) -> None:
    """A step's function may have a collective for each of them: rank 0 had one less."""
    values: dict[str, Any] = {
        "name": "plan",
        "steps": 100,
        "loop": {"script": str(tmp_path / "train.py")},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    }
    job = parse_job(values)
    plans = [StepPlan(job, job_order(0, 64), 2, rank, 3, True) for rank in range(2)]

    def micro_batches(step: int) -> list[list[int]]:
        return [
            [one.number for one in plan.micro_batches(step, plan.wanted(step, lambda dealt: 0))]
            for plan in plans
        ]

    assert micro_batches(3) == [[0, 0, 1], [0, 2, 3]]  # the first of a generation
    assert micro_batches(4) == [[0, 0, 1], [0, 2, 3]]
    assert micro_batches(5) == [[0, 1], [2, 3]]
    for plan, least in zip(plans, (0, 2), strict=True):
        weighed = [one.number for one in plan.micro_batches(4, 3) if one.weight]
        assert weighed == [least, least + 1]
