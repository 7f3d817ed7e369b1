"""The recipe for scripts of Accelerate's form: a lost worker changes nothing of what it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from elastic_ft.cli.app import COMPLETED
from elastic_ft.observe.run_reader import RunReader

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/own_accelerate.py"
KILL = """description: A worker dies in the middle of an epoch.
faults:
  - {point: backward, rank: 1, step: 14, action: kill}
expect: {steps_lost_max: 0}
"""


def trained(folder: Path) -> list[tuple[float, float, float]]:
    lines = RunReader(folder / "runs/own-accelerate").steps()
    assert [line["step"] for line in lines] == [*range(1, 31)]
    return [(line["loss"], line["metrics"]["accuracy"], line["logged"]["rate"]) for line in lines]


def test_the_recipe_comes_to_the_same_without_a_worker(
    start: Callable[..., Any], folder: Path
) -> None:
    """Losses, accuracies of all ranks, rates, and the weights that are exported."""
    (folder / "kill.yaml").write_text(KILL)
    arguments = ("--processes", "--workers", "3", "--chaos", "kill.yaml")
    code, out, err = start("launch", *arguments, str(SCRIPT)).finish()
    assert (code, err) == (COMPLETED, ""), out
    events = RunReader(folder / "runs/own-accelerate").events()
    assert "worker_lost" in [line["event"] for line in events]
    alone = folder / "alone"
    alone.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=alone, env=environment, check=True, timeout=240
    )
    for found, wanted in zip(trained(folder), trained(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    weights, undisturbed = (
        load_file(at / "runs/own-accelerate-weights/model.safetensors") for at in (folder, alone)
    )
    for name, tensor in undisturbed.items():
        assert weights[name].allclose(tensor, rtol=1e-4, atol=1e-5), name
