"""The benchmarks run, at tiny sizes: what they print is another matter. ``pytest -m bench``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TINY = ["--preset", "decoder-1m", "--batch", "1"]

pytestmark = pytest.mark.bench


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("reshard", ["--mib", "260", "--rounds", "1"]),
        ("stall", [*TINY, "--rounds", "1"]),
        ("steps", [*TINY, "--rounds", "1", "--seconds", "4"]),
        ("restart", [*TINY, "--rounds", "1"]),
        ("memory", TINY),
    ],
)
def test_state(command: str, options: list[str], tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks/state.py"), command, *options]
    done = subprocess.run(
        [*program, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / f"state-{command}.json").read_text())
    assert len(record["rounds"]) == 1


def test_gpu_snapshot_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device: the same loop on the processor."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_snapshot

    arguments = argparse.Namespace(
        preset="decoder-1m", vocabulary=4096, batch=1, sequence=32, steps=2, rounds=2
    )
    found = gpu_snapshot.measure(arguments, torch.device("cpu"))
    assert len(found["rounds"]) == 2
    gpu_snapshot.report(found, 1e9)
    if not torch.cuda.is_available():
        program = [sys.executable, str(ROOT / "benchmarks/gpu_snapshot.py")]
        done = subprocess.run(program, capture_output=True, text=True, timeout=280, cwd=ROOT)
        assert done.returncode == 1
        assert done.stderr.strip() == "no CUDA device here: this benchmark needs one GPU"
