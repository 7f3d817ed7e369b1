"""The kit for the first half hour on a GPU: as far as it can be held without one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.config import parse_job

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(KIT))
import job as kit_job  # noqa: E402
import nccl as kit_nccl  # noqa: E402
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
        options |= {
            n: given[given.index(f"--{n}") + 1] for n in names if n not in ("kill", "memory")
        }
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
    assert line["passed"] is False


STOPPED = """
import json, os, sys
print('{"status": "cut o')  # as one that was killed leaves it
print(json.dumps(dict(a=1)))
os._exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_step_that_fails_is_told_as_such(tmp_path: Path, code: int) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED.replace("{code}", str(code)))
    line = kit.run(kit.Step("it", 9, f"{tmp_path}/stopped.py", "words"), "cpu", tmp_path, 60.0)
    assert (line["ended"], line["passed"], line["found"]) == (code, code == 0, [{"a": 1}])
    (tmp_path / "stopped.py").write_text("")
    line = kit.run(kit.Step("it", 9, f"{tmp_path}/stopped.py", "words"), "cpu", tmp_path, 60.0)
    assert line["ended"] == 0 and line["passed"] is False, "it has found nothing"


def test_the_kit_fails_where_a_step_does_or_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "well.py").write_text("print('{\"a\": 1}')")
    (tmp_path / "ill.py").write_text("raise SystemExit('ill')")
    steps = [kit.Step(n, 60, f"{tmp_path}/{n}.py", "words", True) for n in ("well", "ill")]
    for only, minutes, passed in (
        (["well"], 1, {"well": True}),
        (["well", "ill"], 1, {"well": True, "ill": False}),
        (["well"], 0, {"well": False}),
    ):
        monkeypatch.setattr(kit, "STEPS", steps)
        out = tmp_path / "-".join([*only, str(minutes)])
        given = ["--device", "cpu", "--out", str(out), "--minutes", str(minutes), "--only", *only]
        monkeypatch.setattr(sys, "argv", ["run.py", *given])
        assert kit.main() == (0 if all(passed.values()) else 1)
        lines = [json.loads(line) for line in (out / "cpu.jsonl").read_text().splitlines()]
        assert {line["step"]: line["passed"] for line in lines} == passed


def test_what_snapshots_cost_is_told_as_the_kit_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told to people alone, so that its step could not pass."""
    monkeypatch.syspath_prepend(str(KIT.parent))
    import gpu_snapshot

    rounds = [{"with_s": 1.01, "without_s": 1.0, "blocked_s": 0.002}]
    found = {"state_bytes": 4_900_000_000, "rounds": rounds}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(gpu_snapshot, "device_to_host", lambda device: 5e10)
    monkeypatch.setattr(gpu_snapshot, "measure", lambda arguments, device: found)
    monkeypatch.setattr(sys, "argv", ["gpu_snapshot.py", "--out", str(tmp_path / "found.json")])
    gpu_snapshot.main()
    (line,) = kit.told(capsys.readouterr().out.splitlines())
    assert line["longer"] == [0.01] * 3 and line["blocked"] == [0.002] * 3


WELL = {"status": "completed", "steps": kit_job.STEPS, "pids_kept": 3, "pause_s": 0.5, "odd": []}
WELL |= {"events": []}


@pytest.mark.parametrize(
    ("given", "found", "why"),
    [
        ({"kill": True}, {}, ""),
        ({"kill": True}, {"status": "failed"}, "failed"),
        ({"kill": True}, {"steps": 12}, "12 of 40 steps"),
        ({"kill": True}, {"pids_kept": 2}, "2 of 3 processes"),
        ({"kill": True}, {"pause_s": None}, "nobody was killed"),
        ({"fault": "gpu_oom"}, {}, "gpu_oom did nothing"),
        ({"fault": "gpu_oom"}, {"odd": [["x", ""]], "events": ["collective_failed"]}, ""),
        (
            {"fault": "gpu_assert"},
            {"odd": [["x", ""]], "events": ["worker_raised"]},
            "gpu_assert is no device_lost",
        ),
        ({"kill": True}, {"steady_mib": 3000, "peak_mib": 5900}, ""),
        ({"kill": True}, {"steady_mib": 3000, "peak_mib": 6100}, "6100 MiB at the change"),
    ],
)
def test_what_a_job_of_the_kit_must_have_found(
    given: dict[str, Any], found: dict[str, Any], why: str
) -> None:
    options = argparse.Namespace(**{"kill": False, "fault": "", "workers": 4} | given)
    assert why in kit_job.why_failed(options, WELL | found) and (
        bool(why) is bool(kit_job.why_failed(options, WELL | found))
    )


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ({0: {"right": True}, 1: {"right": True}}, ""),
        ({0: {"right": True}}, "1 of 2 ranks answered"),
        ({0: {"right": True}, 1: {"right": False}}, "rank 1: right"),
        ({0: {"right": True}, 1: {"error": "DistBackendError"}}, "rank 1: DistBackendError"),
        ({0: {}, 1: {"broken": [{"woken_s": 0.2}, {"woken_s": 9.5}]}}, "rank 1: broken"),
        (
            {0: {"broken": [{"woken_s": "before the abort", "formed": True}]}, 1: {}},
            "rank 0: formed",
        ),
        ({0: {"files": [9, 9, 10]}, 1: {"files": [9, 19, 29]}}, "rank 1: files"),
        ({0: {"free_mib": [900, 899]}, 1: {"free_mib": [900, 400]}}, "rank 1: free_mib"),
    ],
)
def test_what_communicators_of_the_kit_must_have_done(ranks: dict[int, Any], why: str) -> None:
    found = kit_nccl.why_failed(ranks, 2)
    assert found.startswith(why) and bool(found) is bool(why)
