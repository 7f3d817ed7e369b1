"""The kit for the first half hour on a GPU: as far as it can be held without one."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest

from elastic_ft.config import parse_job

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(KIT))
import job as kit_job  # noqa: E402
import run as kit  # noqa: E402


def test_all_of_it_ends_within_half_an_hour() -> None:
    assert sum(step.limit_s for step in kit.STEPS) <= 60 * kit.MINUTES
    assert len({step.name for step in kit.STEPS}) == len(kit.STEPS)


@pytest.mark.parametrize("step", kit.STEPS, ids=lambda step: step.name)
def test_each_step_is_there_and_its_job_a_job(step: kit.Step) -> None:
    script, *given = shlex.split(step.command)
    assert (KIT / script).is_file()
    if script == "job.py":
        options = {
            "strategy": "fsdp",
            "tp": "1",
            "backend": "auto",
            "preset": "decoder-1m",
            "device": "cuda",
            "technique": "",
        }
        names = [word.removeprefix("--") for word in given if word.startswith("--")]
        options |= {n: given[given.index(f"--{n}") + 1] for n in names if n not in ("kill",)}
        found = argparse.Namespace(**options)
        found.tp, found.workers = int(found.tp), int(found.workers)
        for device in ("cuda", "cpu") if step.on_cpu else ("cuda",):
            found.device = device
            assert parse_job(kit_job.job_of(found)).parallel.wants_gpu is (device == "cuda")


def test_what_is_new_is_tried_too() -> None:
    tried = {word for step in kit.STEPS for word in shlex.split(step.command)}
    assert kit_job.TECHNIQUES.keys() - {""} <= tried


def test_a_step_that_does_not_end_is_killed(tmp_path: Path) -> None:
    step = kit.Step("nccl_init", 1, "nccl.py init --world 1", "to be stuck")
    line = kit.run(step, "cpu", tmp_path, limit_s=0.2)
    assert line["ended"] == "out of time" and line["seconds"] < 30
