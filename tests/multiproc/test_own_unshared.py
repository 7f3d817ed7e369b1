"""Losses that depend on what ranks do not share: seen before they spoil a state, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, ROOT, Gate, run_job
from tests.multiproc.test_own_loop import CLOSE, STEPS, make_job, told


class UntilRefused(Gate):
    """Waits for a replacement, until one was refused."""

    def __call__(self, controller: Controller) -> None:
        if controller.state.unfit:
            self._open()
        else:
            super().__call__(controller)


def unshared(out: Path, what: str, workers: int, strategy: str = "ddp", **more: object) -> Job:
    script = str(ROOT / "tests/multiproc/own_unshared.py")
    loop = {"script": script, "arguments": [str(out / "told"), what], **more}
    elastic = {"min_workers": min(2, workers), "max_workers": workers, "gather_s": 60}
    elastic |= PATIENT | {"join_batch_s": 0.1}  # type: ignore[arg-type]
    return make_job(out, strategy=strategy, loop=loop, elastic=elastic)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_a_micro_batch_leaves_to_the_next_is_refused(tmp_path: Path, strategy: str) -> None:
    """Which one comes next depends on the world: the loss of two workers was another than of three,
    and of those that had lost one."""
    found = run_job(unshared(tmp_path, "carried", 2, strategy), tmp_path / "run")
    assert found.result["status"] == "failed", found.story()
    assert "the micro-batch before has left (a hidden state" in found.result["reason"]
    assert len(found.steps) <= 1, found.story()  # the first begins with what all ranks have


def test_a_step_may_have_a_collective_for_each_micro_batch(tmp_path: Path) -> None:
    """Of which all ranks are dealt as many: where losses are compared one had fewer."""
    found = run_job(unshared(tmp_path, "summed", 2), tmp_path / "run")
    assert found.result["status"] == "completed", found.story()
    assert found.all("collective_failed") == [] == found.all("pausing"), found.story()


def test_a_loss_of_what_all_ranks_are_dealt_is_refused(tmp_path: Path) -> None:
    """All ranks made the same of the first micro-batch, as each was given that at the same time:
    two workers trained on another loss than three, which waited for each other besides."""
    found = run_job(unshared(tmp_path, "gathered", 2), tmp_path / "run")
    assert found.result["status"] == "failed", found.story()
    assert "features gathered over ranks" in found.result["reason"], found.story()
    assert not found.steps, found.story()


def test_it_may_be_allowed(tmp_path: Path) -> None:
    found = run_job(unshared(tmp_path, "carried", 2, compare_losses=False), tmp_path / "run")
    assert found.result["status"] == "completed", found.story()


@pytest.mark.parametrize(
    ("what", "strategy", "told_of"),
    [
        ("counted", "ddp", "a count of the script's own"),
        ("counted", "fsdp", "a count of the script's own"),
        ("averaged", "ddp", "the state of average differs"),
    ],
)
def test_who_joins_with_a_count_of_its_own_takes_no_part(
    tmp_path: Path, what: str, strategy: str, told_of: str
) -> None:
    """Its rate was another than the others': with that it made a step, and then the job ended."""
    alone, lost = tmp_path / "alone", tmp_path / "lost"
    undisturbed = run_job(unshared(alone, what, 1), alone / "run")
    watch, fault = UntilRefused(lost / "told" / "gate"), PointFault("backward", rank=1, step=4)
    job = unshared(lost, what, 3, strategy)
    found = run_job(job, lost / "run", faults=[fault], watch=watch)
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, STEPS + 1)], found.story()
    for line, of in zip(found.steps, undisturbed.steps, strict=True):
        assert line["loss"] == pytest.approx(of["loss"], rel=CLOSE), line["step"]
    refused = [line["reason"] for line in found.all("worker_refused")]
    assert refused and all(told_of in why for why in refused), found.story()


@pytest.mark.parametrize(
    ("what", "told_of"), [("kept", "ctx.register"), ("indexed", "KeyError"), ("nan", "nan on")]
)
def test_who_joins_without_what_others_keep_takes_no_part(
    tmp_path: Path, what: str, told_of: str
) -> None:
    """It would draw from what it has collected itself, nothing, or find nothing there; that error
    ended the job."""
    alone, lost = tmp_path / "alone", tmp_path / "lost"
    undisturbed = run_job(unshared(alone, what, 1), alone / "run")
    watch = UntilRefused(lost / "told" / "gate")
    fault = PointFault("backward", rank=1, step=4)
    found = run_job(unshared(lost, what, 3), lost / "run", faults=[fault], watch=watch)
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, STEPS + 1)], found.story()
    for line, of in zip(found.steps, undisturbed.steps, strict=True):
        assert line["loss"] == pytest.approx(of["loss"], rel=CLOSE), line["step"]
    refused = [line["reason"] for line in found.all("worker_refused")]
    assert refused and all(told_of in why for why in refused), found.story()
    average, made = (line["reason"] for line in found.all("unregistered"))
    assert average.startswith("average (GRUCell) changes"), found.story()
    assert made.startswith("made (2) is carried from step to step"), found.story()
    ended = [lines for lines in told(lost).values() if lines and lines[-1]["step"] == STEPS]
    assert len(ended) >= 2, "the survivors, in their processes"
