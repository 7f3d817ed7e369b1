"""Ctrl-C while a loop of one's own runs alone, as in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.observe.run_reader import RunReader
from tests.cli.alone import Alone

SCRIPT = Path(__file__).with_name("own_interrupted.py")
Interrupted = Callable[[str], tuple[int, list[str]]]


@pytest.fixture
def interrupted(alone: Alone, folder: Path) -> Interrupted:
    def run(what: str) -> tuple[int, list[str]]:
        code, out, err = alone(folder, SCRIPT, what)
        return code, [*out, *err]

    return run


@pytest.mark.parametrize(("what", "last"), [("step", 3), ("attempt", 2)])
def test_the_next_cell_goes_on(
    interrupted: Interrupted, folder: Path, what: str, last: int
) -> None:
    """In a step's function it comes after the step; a block is left, and its step made again."""
    code, said = interrupted(what)
    assert code == 0, said
    assert f"left, the last step made is {last}" in said and "weight 6.0" in said
    run = RunReader(folder / "runs/own_interrupted")
    assert [line["step"] for line in run.steps()] == [*range(1, 7)]
    assert run.result()["status"] == "completed"


def test_a_block_that_is_left_once_its_optimizer_has_stepped_is_not_made_again(
    interrupted: Interrupted,
) -> None:
    """Nobody else has the state of before: the next cell is told so, and trains nothing else."""
    code, said = interrupted("late")
    assert code != 0 and "left, the last step made is 2" in said
    assert "JobFailed: no state is held and no checkpoint is good" in said[-1]


def test_a_script_that_is_interrupted_is_stopped_with_a_checkpoint(
    interrupted: Interrupted, folder: Path
) -> None:
    """It waited for five minutes, and ended as failed."""
    code, said = interrupted("script")
    assert code != 0 and said[-1].endswith("KeyboardInterrupt"), said
    result = RunReader(folder / "runs/own_interrupted").result()
    assert (result["status"], result["steps"]) == ("stopped", 3)
    assert [one["step"] for one in result["checkpoints"]] == [3]


def test_a_second_interrupt_ends_a_script_whose_controller_does_not_answer(
    interrupted: Interrupted,
) -> None:
    """It ended by SIGABRT, its interpreter among threads that hung."""
    code, said = interrupted("stuck")
    assert code == 130, said
    assert said[-1].startswith("elastic_ft: interrupted again: ended at once"), said


@pytest.mark.parametrize(
    ("what", "why"),
    [("stands", "its controller stands still"), ("closes", "its controller does not end")],
)
def test_a_script_does_not_wait_for_ever_for_a_controller_that_hangs(
    interrupted: Interrupted, what: str, why: str
) -> None:
    """An hour and more, where its run folder's mount hangs; or it ended as if all were well."""
    code, said = interrupted(what)
    assert code == 1, said
    assert said[-1].startswith(f"elastic_ft: {why}"), said
    assert "goes on from the newest checkpoint of " in said[-1]


def test_a_script_that_trains_nothing_ends_with_a_line(
    interrupted: Interrupted, folder: Path
) -> None:
    """Without ctx.prepare it trained by itself, and then hung for a quarter of an hour."""
    code, said = interrupted("idle")
    assert code == 1 and "never asked a loader of ctx.prepare for a batch" in said[-1], said
    assert RunReader(folder / "runs/own_interrupted").result()["status"] == "failed"
