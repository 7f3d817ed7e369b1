"""Streams in a loop of one's own: exactly once through a kill, a joiner and a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.data.stream import SampleStream
from elastic_ft.faults import PointFault
from tests.multiproc import streams
from tests.multiproc.harness import ROOT, Run
from tests.multiproc.test_own_loop import make_job, run, told

KILLED_AT, SAVED_AT, STEPS = 19, 40, 46
BUFFER = {"hugging face": 5, "plain": 0}


def train(out: Path, kind: str, steps: int, workers: int, *faults: PointFault) -> Run:
    script = str(ROOT / "tests/multiproc/own_stream.py")
    loop = {"script": script, "arguments": [str(out / "told"), kind, str(steps)]}
    url = str(out.parent / f"{out.parent.name}-checkpoints")
    job = make_job(out, loop=loop, workers=workers, checkpoint={"url": url})
    return run(out, job, faults)


def check(found: Run, out: Path, first: int, last: int, kind: str) -> None:
    """Each step has what one process would have read."""
    assert found.result["status"] == "completed", found.story()
    assert [line["step"] for line in found.steps] == [*range(first, last + 1)], found.story()
    assert found.ledger is not None
    for line in found.ledger:
        stop = 16 * line["step"]
        assert line["samples"] == [*range(stop - 16, stop)]
    lines = [line for lines in told(out).values() for line in lines]
    by_place = {(line["step"], line["rank"]): line["read"] for line in lines}
    assert len(by_place) == len(lines), "code after a step runs once"
    seen: dict[int, list[int]] = {}
    for step, rank in sorted(by_place):
        seen.setdefault(step, []).extend(by_place[step, rank])
    whole = SampleStream(
        streams.of_kind(kind, out / "no gate"),
        16,
        2,
        seed=3,
        shuffle_buffer=BUFFER[kind],
    )
    for step in range(first, last + 1):
        read = [whole[p] for p in range(16 * (step - 1), 16 * step)]
        expected = [x["number"] if isinstance(x, dict) else x for x in read]
        if step == KILLED_AT - 1 and len(seen[step]) < 16:
            continue  # who was lost had it behind it, and had not told
        assert seen[step] == expected


@pytest.mark.parametrize("kind", ["hugging face", pytest.param("plain", marks=pytest.mark.soak)])
def test_a_stream_goes_on_through_a_kill_a_joiner_and_a_restart(tmp_path: Path, kind: str) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    found = train(first, kind, SAVED_AT, 3, PointFault("backward", rank=1, step=KILLED_AT))
    assert found.worlds() == [3, 2, 3], found.story()
    check(found, first, 1, SAVED_AT, kind)
    found = train(again, kind, STEPS, 2)
    assert found.worlds() == [2], found.story()
    check(found, again, SAVED_AT + 1, STEPS, kind)
