"""Loops over epochs: who joins is in the epoch where the job is; the end is the loop's own."""

from __future__ import annotations

from pathlib import Path

from elastic_ft.faults import PointFault
from tests.multiproc.harness import ROOT
from tests.multiproc.test_own_loop import make_job, run, told

EPOCHS, STEPS = 10, 70 // 16  # in an epoch: whole batches


def test_epochs_go_on_where_the_job_is(tmp_path: Path) -> None:
    script = str(ROOT / "tests/multiproc/own_epochs.py")
    loop = {"script": script, "arguments": [str(tmp_path / "told"), str(EPOCHS)]}
    snapshot = {"every_steps": 100}  # none is due when the loop ends
    job = make_job(tmp_path, loop=loop, snapshot=snapshot)
    found = run(tmp_path, job, (PointFault("backward", rank=1, step=STEPS + 2),))
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, EPOCHS * STEPS + 1)]
    assert not [e for e in found.all("pausing") if "nobody moved" in e["reason"]], found.story()
    assert found.worlds() == [3, 2, 3], found.story()
    epochs = {
        epoch: [*range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)] for epoch in range(EPOCHS)
    }
    ended = 0
    for lines in told(tmp_path).values():
        ended += bool(lines and lines[-1].get("after"))
        for line in lines:
            if "epoch" in line:
                whole = epochs[line["epoch"]]
                assert line["steps"] == whole[-len(line["steps"]) :], "the rest of it, at least"
                assert line["rate"] == 0.1 * 0.5 ** (line["epoch"] + 1)
                assert line["finished"] == line["epoch"] + 1, "a variable that was prepared by name"
    assert ended == 3, found.story()


def test_a_rollback_over_two_calls_of_epochs_parts_nobody(tmp_path: Path) -> None:
    """Whose script has left the first call can't make a step of it: another worker does."""
    script = str(ROOT / "tests/multiproc/own_phases.py")
    loop = {"script": script, "arguments": [str(tmp_path / "told")]}
    job = make_job(tmp_path, strategy="fsdp", loop=loop, snapshot={"every_steps": 2})
    found = run(tmp_path, job, (PointFault("backward", rank=1, step=STEPS + 1),))
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(1, 3 * STEPS + 1)], found.story()
    for lines in told(tmp_path).values():
        for line in lines:
            assert line["phase"] == int(line["step"] > STEPS), found.story()
    assert found.all("stepped_aside"), found.story()
