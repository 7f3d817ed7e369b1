"""What a run folder keeps of steps that were voided."""

from __future__ import annotations

import json
import math
from pathlib import Path
from uuid import uuid4

import pytest

from elastic_ft.errors import Superseded
from elastic_ft.observe.run_folder import ASIDE_MAX, RunFolder, read_lines
from elastic_ft.storage.store import open_store


def test_voided_lines_stay_beside_the_record_and_not_for_ever(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    for step in range(1, 11):
        folder.record_step({"step": step, "generation": 1}, [step])
    folder.truncate(10)
    assert not list(tmp_path.glob("*.[0-9]*.jsonl")), "nothing was voided"
    for step in range(9, 9 - ASIDE_MAX - 2, -1):
        folder.truncate(step)
    left = [line["step"] for line in read_lines(tmp_path / "steps.jsonl")]
    assert left == list(range(1, 9 - ASIDE_MAX))
    assert len(left) == len(read_lines(tmp_path / "ledger.jsonl"))
    numbers = range(3, ASIDE_MAX + 3)
    for name in ("steps", "ledger"):
        beside = sorted(path.name for path in tmp_path.glob(f"{name}.*.jsonl"))
        assert beside == [f"{name}.{number}.jsonl" for number in numbers]
    oldest = [line["step"] for line in read_lines(tmp_path / "steps.3.jsonl")]
    assert oldest == list(range(1, 9))
    folder.close()


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.record_step({"step": 1, "generation": 1, "loss": math.nan, "of": [math.inf, 0.5]}, [1])
    folder.write_result({"final_loss": math.nan})
    folder.close()

    def refuse(found: str) -> None:
        raise AssertionError(f"{found} is not JSON")

    line = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "generation": 1, "loss": None, "of": [None, 0.5]}
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result == {"final_loss": None}


def test_a_successor_that_is_half_written_does_not_end_the_mirror() -> None:
    """Of a store that writes no whole objects: what can't be understood yet is read again."""
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    folder.take_over("run1", "job")
    folder._stop_mirror.set()  # mirrored by hand, below
    store = open_store(folder.url)
    successor = store.get("owners/1").replace(b"run1", b"run2")
    store.put("owners/2", successor[:20])
    folder.journal(1.0, "said", 0, "", {})
    folder._mirror()
    assert "owners/2 is not what a controller writes" in folder.mirror_error
    folder.check_owner()
    store.put("owners/2", successor)
    folder._mirror()
    with pytest.raises(Superseded, match="by run run2"):
        folder.check_owner()
    folder.close()
