"""Whole runs through the command line: exit codes, and what the run folder holds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, FAILED, INTERRUPTED, run_command
from elastic_ft.config import load_job
from elastic_ft.core.invariants import Expected
from elastic_ft.observe.run_reader import RunReader

Start = Callable[..., Any]
WriteJob = Callable[..., str]
STEP_KEYS = {
    *("step", "generation", "world_size", "layout", "loss", "lr", "grad_norm"),
    *("samples", "tokens", "step_time_s"),
}
RESULT_KEYS = {
    *("status", "reason", "steps", "samples", "final_loss", "state_digest"),
    *("goodput", "badput", "generations", "recoveries"),
}
RECOVERY_KEYS = {
    *("cause", "at_step", "noticed_s", "paused_s", "steps_lost", "source", "bytes_moved"),
    *("world_before", "world_after", "layout_before", "layout_after", "survivors_kept_pid"),
}


def check(path: Path, *, starts: int = 1, **expected: Any) -> RunReader:
    """The run folder, which contradicts no invariant.

    Worker ids begin anew with every start, so I1 and I6 say nothing of a folder of several.
    """
    run = RunReader(path)
    violations = run.violations(Expected(**expected))
    silent = () if starts == 1 else ("I1", "I6")
    assert [str(found) for found in violations if found.invariant not in silent] == []
    return run


def test_a_run_completes_and_its_folder_tells(
    start: Start, write_job: WriteJob, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job()
    code, out, err = start("run", job, "--processes").finish()
    assert (code, err) == (COMPLETED, "")
    assert out.splitlines()[-1].startswith("completed: 12 steps")
    run = check(folder / "runs/tiny", seed=0, global_batch_size=4, steps=12, status="completed")
    assert run.result().keys() >= RESULT_KEYS
    assert all(line.keys() >= STEP_KEYS for line in run.steps())
    assert [line["step"] for line in run.steps()] == list(range(1, 13))
    assert run.ledger() is not None
    assert load_job(folder / "runs/tiny/job.yaml").name == "tiny"
    formed = next(line for line in run.events() if line["event"] == "generation_formed")
    assert formed.keys() >= {"step", "layout", "members"}
    assert all(
        member.keys() >= {"worker", "rank", "pid", "node", "host", "raylet_pid"}
        for member in formed["members"]
    )
    committed = [line for line in run.events() if line["event"] == "checkpoint_committed"]
    assert committed[-1].keys() >= {"step", "url", "bytes", "seconds"}

    contents = {path: path.read_bytes() for path in (folder / "runs/tiny").glob("*.*")}
    assert run_command(["run", job, "--processes"]) == COMPLETED
    (said,) = capfd.readouterr().out.splitlines()
    assert said.startswith("tiny is complete: 12 steps, result of 20")
    assert {path: path.read_bytes() for path in (folder / "runs/tiny").glob("*.*")} == contents


def test_an_interrupt_stops_cleanly_and_resume_goes_on(
    start: Start, write_job: WriteJob, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job({"steps": 100_000})
    command = start("run", job, "--processes")
    command.until_step(3)
    command.interrupt()
    code, out, err = command.finish()
    assert (code, err) == (INTERRUPTED, "")
    assert out.splitlines()[-1].startswith("stopped: interrupted; last good checkpoint: step")
    stopped = check(folder / "runs/tiny", seed=0, global_batch_size=4, status="stopped")
    manifest = max((folder / "runs/tiny/checkpoints/manifests").iterdir())
    before = stopped.steps()
    last = before[-1]["step"]
    assert int(manifest.name.split("-")[0]) == last

    fewer = write_job({"steps": last - 1})
    assert run_command(["run", fewer, "--processes"]) == BAD_USAGE
    (refused,) = capfd.readouterr().err.splitlines()
    assert f"steps: {last - 1} is below step {last}, from which" in refused

    saved = yaml.safe_load((folder / "runs/tiny/job.yaml").read_text()) | {"steps": last + 4}
    (folder / "runs/tiny/job.yaml").write_text(yaml.safe_dump(saved))
    code, out, err = start("resume", "runs/tiny", "--processes").finish()
    assert (code, err) == (COMPLETED, "")
    assert "resuming from checkpoint" in out
    resumed = check(folder / "runs/tiny", starts=2, seed=0, global_batch_size=4, steps=last + 4)
    assert resumed.steps()[: len(before)] == before

    assert run_command(["replay", "runs/tiny"]) == COMPLETED
    assert "each as recorded" in capfd.readouterr().out
    assert run_command(["events", "runs/tiny", "--raw"]) == COMPLETED
    header, *journal = capfd.readouterr().out.splitlines()
    assert header.startswith("seconds since ")
    assert len(journal) == len(resumed.events())
    assert "finished: all" in journal[-1]


def test_signals_that_come_together_stop_once_with_a_checkpoint(
    start: Start, write_job: WriteJob, folder: Path
) -> None:
    command = start("run", write_job({"steps": 100_000}), "--processes")
    command.until_step(3)
    command.process.send_signal(signal.SIGTERM)
    command.process.send_signal(signal.SIGINT)
    code, out, _ = command.finish()
    assert code == INTERRUPTED
    assert out.splitlines()[-1].startswith("stopped: interrupted; last good checkpoint: step")
    assert json.loads((folder / "runs/tiny/result.json").read_text())["status"] == "stopped"


def test_a_failing_job_ends_with_one_line(start: Start, write_job: WriteJob, folder: Path) -> None:
    (folder / "broken.py").write_text(
        "import torch\n"
        "class Data:\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, i): raise RuntimeError('sample is rotten')\n"
        "def data(): return Data()\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x).sum(), 1\n"
    )
    job = write_job(
        {
            "data": {"path": "broken:data"},
            "model": {"path": "broken:Model", "kwargs": {"in_features": 2, "out_features": 2}},
            "elastic.max_user_failures": 0,
        }
    )
    code, out, err = start("run", job, "--processes").finish()
    assert code == FAILED
    assert err.count("\n") == 1, err
    assert "sample is rotten" in err
    where = f"{folder}/broken.py:4 in __getitem__: def __getitem__(self, i): raise RuntimeError"
    assert where in out, "the console says where"
    events = RunReader(folder / "runs/tiny").events()
    (raised,) = [line for line in events if line["event"] == "worker_raised"][:1]
    assert raised["frames"][-1].startswith(where)
    assert "Traceback" not in err
    assert json.loads((folder / "runs/tiny/result.json").read_text())["status"] == "failed"


def test_a_scenario_strikes_from_outside_and_inside(
    start: Start, write_job: WriteJob, folder: Path
) -> None:
    (folder / "faults.yaml").write_text(
        yaml.safe_dump(
            {
                "faults": [
                    {"at_step": 20, "kill": "node", "of_rank": 1},
                    {"at_event": "recovered", "add": "node"},
                    {"point": "backward", "rank": 0, "step": 300, "action": "kill"},
                ]
            }
        )
    )
    job = write_job({"steps": 400, "parallel.strategy": "fsdp"})
    code, out, err = start("run", job, "--processes", "--chaos", "faults.yaml").finish()
    assert (code, err) == (COMPLETED, ""), out
    run = check(folder / "runs/tiny", seed=0, global_batch_size=4, steps=400, status="completed")
    assert run.result()["recoveries"][0].keys() >= RECOVERY_KEYS
    causes = {recovery["cause"]: recovery for recovery in run.result()["recoveries"]}
    assert causes["node_lost"]["steps_lost"] == 0
    assert "worker_joined" in causes
    assert run.result()["faults_fired"] == [0]
    fired = [json.loads(line) for line in (folder / "runs/tiny/chaos.jsonl").open()]
    assert [line["fault"] for line in fired] == [
        "kill node of rank 1 at step 20",
        "add node at event recovered",
    ]
    assert "recovered from" in out


UNFIRED: dict[str, dict[str, Any]] = {
    "stop worker of rank 7 at step 3 (there is no rank 7 in generation 1)": {
        "at_step": 3,
        "stop": "worker",
        "of_rank": 7,
    },
    "kill worker of rank 0 at step 1000": {"at_step": 1000, "kill": "worker", "of_rank": 0},
    "add node at event suspended": {"at_event": "suspended", "add": "node"},
    "raise at data of step 1000": {"point": "data", "step": 1000, "action": "raise"},
}


def test_faults_that_never_fired_fail_the_run(
    start: Start, write_job: WriteJob, folder: Path
) -> None:
    (folder / "faults.yaml").write_text(yaml.safe_dump({"faults": [*UNFIRED.values()]}))
    job = write_job({"faults.scenario": "faults.yaml"})
    code, out, err = start("run", job, "--processes").finish()
    assert code == FAILED
    assert "completed: 12 steps" in out
    (line,) = err.splitlines()
    _, _, names = line.partition("faults that never fired: ")
    assert sorted(names.split("; ")) == sorted(UNFIRED)


def test_a_run_on_local_nodes(start: Start, write_job: WriteJob, folder: Path) -> None:
    code, out, err = start("run", write_job(), "--local-nodes", "2", "--out", "there").finish()
    assert (code, err) == (COMPLETED, ""), out
    run = check(folder / "there", seed=0, global_batch_size=4, steps=12, status="completed")
    formed = next(line for line in run.events() if line["event"] == "generation_formed")
    assert len({member["raylet_pid"] for member in formed["members"]}) == 2
