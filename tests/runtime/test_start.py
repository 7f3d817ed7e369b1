"""What a controller finds in its run folder before it starts anyone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ConfigError
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.runtime.controller import Controller
from elastic_ft.runtime.local import LocalHost
from elastic_ft.storage import checkpoints
from elastic_ft.storage.store import open_store
from tests.multiproc.harness import make_job


class Idle(LocalHost):
    """Of a job that is not to start."""

    def start(self, *args: Any) -> None:
        raise AssertionError("nothing is to be started")


def controller(folder: Path, steps: int) -> Controller:
    job, run = make_job(steps=steps), RunFolder(str(folder))
    return Controller(job, Idle({}), run, str(folder / "checkpoints"))


def publish(folder: Path, step: int) -> None:
    store = open_store(str(folder / "checkpoints"))
    box = Box((0,), (4,))
    pieces = [("w", box, "float32", memoryview(np.zeros(4, np.float32)).cast("B"))]
    prefix = checkpoints.attempt_prefix("run", 1, step)
    entries = tuple(
        ShardEntry.from_dict(item) for item in checkpoints.write_shards(store, prefix, 0, pieces)
    )
    manifest = Manifest(
        job="tiny",
        run="run",
        step=step,
        generation=1,
        nonce="nonce",
        layout="ddp1",
        created_at_s=time.time(),
        tensors={"w": TensorSpec("float32", (4,))},
        entries=entries,
    )
    checkpoints.commit(store, manifest, 2)


def test_a_complete_job_is_not_run_again(tmp_path: Path) -> None:
    """D7: its workers were started, and its result overwritten with nothing."""
    before = {"status": "completed", "steps": 7, "final_loss": 0.5, "ended_at_s": 1.0}
    (tmp_path / "result.json").write_text(json.dumps(before))
    assert controller(tmp_path, steps=7).run() == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == before


def test_fewer_steps_than_there_are_is_refused(tmp_path: Path) -> None:
    """D6: it said "completed: 1372 steps" of a job of 900."""
    publish(tmp_path, 1372)
    with pytest.raises(ConfigError, match=r"^steps: 900 is below step 1372, from which"):
        controller(tmp_path, steps=900).run()
    assert not (tmp_path / "controller.json").exists(), "nothing was cut off: nobody is to restart"
    assert not (tmp_path / "result.json").exists()
