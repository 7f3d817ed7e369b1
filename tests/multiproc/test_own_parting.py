"""Ranks whose loops part: one leaves its loop, or evaluates, where another makes one more step."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.config import Job
from elastic_ft.controller.controller import Controller
from elastic_ft.faults import PointFault
from tests.multiproc.harness import PATIENT, ROOT, Gate, run_job
from tests.multiproc.test_own_loop import make_job, run, told

LAST = 8  # step


def parting(out: Path, what: str, **sections: object) -> Job:
    script = str(ROOT / "tests/multiproc/own_counted.py")
    loop = {"script": script, "arguments": [str(out / "told"), what]}
    elastic = {"min_workers": 2, "max_workers": 3, "gather_s": 60, "join_batch_s": 0.1}
    return make_job(out, loop=loop, elastic=elastic | PATIENT, **sections)


def test_who_leaves_by_a_count_of_its_own_ends_it_for_who_joined(tmp_path: Path) -> None:
    """Who joined in the middle has counted less, and would train on alone."""
    found = run(tmp_path, parting(tmp_path, "count"), (PointFault("backward", rank=1, step=3),))
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, LAST + 1)], found.story()
    assert len(found.all("worker_lost")) == 1, found.story()
    assert 3 in found.worlds(), found.story()
    parted = [line["reason"] for line in found.all("ranks_part")]  # by each that notices at once
    assert parted, found.story()
    assert all(f"has left its loop after step {LAST}" in why for why in parted), found.story()
    everyone = told(tmp_path).values()
    assert len([lines for lines in everyone if lines and lines[-1].get("after")]) == 2


def test_a_rank_that_leaves_alone_ends_it_for_all(tmp_path: Path) -> None:
    found = run(tmp_path, parting(tmp_path, "rank"))
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, LAST + 1)], found.story()
    assert not found.all("worker_lost"), found.story()


def test_what_one_rank_alone_evaluates_is_told_of(tmp_path: Path) -> None:
    """It stood in a collective of its own until it was taken for hung, and so did the next one."""
    job = parting(tmp_path, "evaluate", steps=LAST)
    found = run(tmp_path, job)
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, LAST + 1)], found.story()
    assert not found.all("worker_lost"), found.story()
    parted, where = found.all("ranks_part"), "in evaluation or export 1 between two steps"
    assert parted and all(where in line["reason"] for line in parted), found.story()


class UntilRefused(Gate):
    """Whoever is refused does not make the world whole: nobody waits for another."""

    def __call__(self, controller: Controller) -> None:
        if controller.state.unfit:
            self._open()
        else:
            super().__call__(controller)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("epochs", "ctx.epochs: here over range(2, 4), of 8 steps each"),
        ("over", "ctx.epochs: range(2, 2), of 8 steps each, from step 1 on, are over here"),
    ],
)
def test_who_begins_at_another_epoch_is_refused(tmp_path: Path, what: str, why: str) -> None:
    """That of a snapshot of the script: all ended with its last step, half of the epochs unmade."""
    job = parting(tmp_path, what)
    gate, fault = UntilRefused(tmp_path / "told/gate"), PointFault("backward", rank=1, step=3)
    found = run_job(job, tmp_path / "run", faults=(fault,), watch=gate)
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, 2 * LAST + 1)], found.story()
    refused = [line["reason"] for line in found.all("worker_refused")]
    assert refused and all(why in said for said in refused), found.story()
