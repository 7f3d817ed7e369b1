"""Steps whose gradients are not finite: skipped, told, and no more of them than allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ft.cli.progress import ProgressDisplay
from elastic_ft.engines.loss_scale import LossScale, NonFiniteGradient
from elastic_ft.observe.journal_text import brief, story
from tests.oneproc.alone import attached, job_of, run_step

GOOD, BAD = 1.0, math.nan


class Model(nn.Module):
    """Its loss is NaN where a sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.line(x).square().sum(), len(x)


def job(skip: int, dtype: str = "fp32", **precision: Any) -> Any:
    optimizer = {"lr": 0.1, "schedule": "constant", "skip_nonfinite": skip}
    return job_of(optimizer=optimizer, precision={"dtype": dtype, **precision})


def batch(value: float) -> Tensor:
    return torch.tensor([[value, 2.0], [3.0, 4.0]])


def trained(job: Any, *values: float) -> tuple[list[Tensor], list[str]]:
    """The parameters after a step of each value, and the notes."""
    with attached(job, Model) as engine:
        notes = []
        for step, value in enumerate(values, 1):
            _, _, update = run_step(engine, step, [batch(GOOD), batch(value)])
            assert update.skipped == (not math.isfinite(value))
            notes.append(update.note)
        return [p.detach().clone() for p in engine._model.parameters.values()], notes


def test_a_skipped_step_leaves_everything_as_it_was() -> None:
    with_bad, notes = trained(job(1), GOOD, BAD, 2 * GOOD)
    without, _ = trained(job(0), GOOD, 2 * GOOD)
    assert all(map(torch.equal, with_bad, without))
    assert notes[1].startswith("step 2: the global gradient norm is nan: it is not applied, 1 of")
    assert notes[::2] == ["", ""]


@pytest.mark.parametrize(("skip", "values"), [(0, (BAD,)), (2, (GOOD, BAD, BAD, BAD))])
def test_one_more_in_a_row_than_allowed_fails(skip: int, values: tuple[float, ...]) -> None:
    with pytest.raises(NonFiniteGradient, match=f"^step {len(values)}: the global .* is nan"):
        trained(job(skip), *values)


def test_only_steps_in_a_row_count() -> None:
    trained(job(2), BAD, BAD, GOOD, BAD, BAD, GOOD)


def test_a_step_that_is_run_again_counts_once() -> None:
    scale = LossScale(job(2))
    for step in (5, 6, 5, 6, 4, 5):
        assert scale.skipped(step, BAD).skipped
    with pytest.raises(NonFiniteGradient, match="as in the 2 before it"):
        scale.skipped(6, BAD)


def test_steps_that_a_rank_was_away_for_are_not_of_a_row() -> None:
    scale = LossScale(job(2))
    notes = [scale.skipped(step, BAD).note for step in (5, 200, 201, 7)]
    assert [note.rpartition(", ")[2][0] for note in notes] == ["1", "1", "2", "1"]


def test_a_loss_scale_stops_at_one_where_nan_is_no_overflow() -> None:
    """It went on to 0, and divided by it."""
    scale = LossScale(job(0, "fp16", initial_loss_scale=2.0**7))
    notes = [scale.skipped(step, BAD).note for step in range(1, 8)]
    assert scale.factor == 1.0
    assert [note for note in notes if note] == ["5 steps in a row overflowed, the loss scale is 4"]
    with pytest.raises(NonFiniteGradient, match="is nan at the least loss scale, 1"):
        scale.skipped(8, BAD)


def test_a_loss_scale_that_had_sunk_to_nothing_is_raised() -> None:
    scale = LossScale(job(0, "fp16"))
    scale.state["engine.loss_scale"].zero_()
    scale.restored()
    assert scale.factor == 1.0


def test_fp16_skips_at_the_least_scale_as_other_precisions_do() -> None:
    values = (BAD, BAD, BAD, GOOD)
    _, notes = trained(job(3, "fp16", initial_loss_scale=1.0), *values)
    assert [bool(note) for note in notes] == [True, True, True, False]


def test_a_loss_that_is_none_is_told_as_such(tmp_path: Path) -> None:
    """JSON has no NaN: lines have null."""
    shown = ProgressDisplay(job(0), str(tmp_path))
    line = {"step": 3, "loss": None, "committed_at_s": 1.0, "world_size": 1, "generation": 1}
    shown._recent.append(line)
    assert "loss nan" in shown._describe(line)
    held_out = {"event": "evaluated", "step": 3, "loss": None, "reason": "", "generation": 1}
    assert "loss nan" in "".join((brief(held_out), *story(held_out, 0.0)))
