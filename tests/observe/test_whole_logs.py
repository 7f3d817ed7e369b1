"""Committed steps for Weights & Biases and MLflow: each once, as their own files have it."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import BAD_USAGE, COMPLETED, run_command
from elastic_ft.errors import UsageError
from elastic_ft.observe.whole_logs import MlflowLog, WandbLog

STEPS = "steps.jsonl"


def line(step: int, generation: int = 1) -> dict[str, Any]:
    values = {"step": step, "generation": generation, "loss": step + generation / 10}
    return values | {"samples": 8 * step, "logged": {"f1@3": step / 10, "note": "text"}}


def history(last: int, back_to: int = 0) -> list[dict[str, Any]]:
    """Of a run that went back to ``back_to``, if that is given."""
    first = [line(step) for step in range(1, (back_to or last) + 1)]
    return first + [line(step, generation=2) for step in range(len(first) + 1, last + 1)]


WANTED = [(step, step + 0.1) for step in range(1, 6)] + [(step, step + 0.2) for step in range(6, 9)]


# --------------------------------------------------------------------------- Weights & Biases


def in_wandb(folder: Path, name: str) -> list[tuple[int, float]]:
    """What `wandb sync` would send: of all offline runs, in blocks as of LevelDB's log."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="the extra [wandb]")
    found = []
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        raw, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(raw):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", raw, at)
            whole, at = whole + raw[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, whole = pb.Record.FromString(whole), b""
                values = {i.nested_key[0]: i.value_json for i in record.history.item}
                if name in values:
                    found.append((record.history.step.num, float(values[name])))
    return found


def wandb_log(folder: Path, lines: list[dict[str, Any]]) -> WandbLog:
    return WandbLog(folder, lambda: lines, "mine", "tests")


KILLED = """import os, signal, sys
from pathlib import Path
from tests.observe.test_whole_logs import history, wandb_log
log = wandb_log(Path(sys.argv[1]), history(7))
assert log.write(history(7)) == 7
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_wandb_has_each_step_once_though_its_writer_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra [wandb]")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=100)
    assert done.returncode == -signal.SIGKILL
    others = tmp_path / "wandb/offline-run-20260101_000000-theirs"
    others.mkdir()
    log = wandb_log(tmp_path, lines := history(7))
    try:
        assert log.write(lines) == 7, "nobody knows how much of it is on disk"
        lines[:] = history(8, back_to=5)
        assert log.write(lines) == 8, "all of it, as the run is now"
        assert log.write(lines) == 0
    finally:
        log.close()
    assert in_wandb(tmp_path, "loss") == WANTED
    assert others.is_dir() and len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert in_wandb(tmp_path, "samples") == in_wandb(tmp_path, "logged/note") == []


# ------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="the extra [mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f"file://{tmp_path / 'store'}"


def in_mlflow(store: str, name: str) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    return [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)]


@pytest.fixture
def mlflow_log(store: str, tmp_path: Path) -> Callable[..., MlflowLog]:
    def make(lines: list[dict[str, Any]]) -> MlflowLog:
        return MlflowLog(tmp_path / "mlflow", lambda: lines, "mine", "tests", store)

    return make


def test_mlflow_has_each_step_once_though_its_writer_is_killed(
    mlflow_log: Callable[..., MlflowLog], store: str, tmp_path: Path
) -> None:
    cursor = tmp_path / "mlflow/cursor.json"
    log = mlflow_log(history(5))
    assert log.write(history(5)) == 5
    before = cursor.read_text()
    log.write(history(7))
    log.close()
    assert in_mlflow(store, "loss") == [(step, step + 0.1) for step in range(1, 8)]
    cursor.write_text(before)  # killed before it could say how far it was
    log = mlflow_log(history(7))
    log.write(history(7))
    log.close()
    assert in_mlflow(store, "loss") == [(step, step + 0.1) for step in range(1, 8)]
    cursor.write_text(before)  # and then the run went back
    log = mlflow_log(lines := history(8, back_to=5))
    log.write(lines)
    log.close()
    assert in_mlflow(store, "loss") == WANTED
    assert in_mlflow(store, "logged/f1_3") == [(step, step / 10) for step in range(1, 9)]
    cursor.unlink()  # killed after it had begun anew
    log = mlflow_log(lines)
    log.write(lines)
    with pytest.raises(UsageError, match="another process writes to"):
        mlflow_log(lines)
    log.close()
    assert in_mlflow(store, "loss") == WANTED


# ------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("tool", ["wandb", "mlflow"])
def test_a_command_goes_on_where_it_was(
    tool: str, tmp_path: Path, capsys: Any, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(tool, reason=f"the extra [{tool}]")
    options = ["--name", "mine"]
    if tool == "mlflow":
        uri = request.getfixturevalue("store")
        options += ["--tracking-uri", uri, "--experiment", "tests"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").write_text("")
    for last in (3, 5, 5):
        (run / STEPS).write_text("".join(json.dumps(known) + "\n" for known in history(last)))
        assert run_command([tool, str(run), *options]) == COMPLETED
        assert f"up to step {last}" in capsys.readouterr().out
    seen = in_mlflow(uri, "loss") if tool == "mlflow" else in_wandb(run / "wandb", "loss")
    assert seen == WANTED[:5]


def test_a_store_that_mlflow_does_not_use_is_told_in_a_line(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    (tmp_path / "events.jsonl").write_text("")
    assert run_command(["mlflow", str(tmp_path), "--tracking-uri", store]) == BAD_USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert "mlflow: The filesystem tracking backend" in said
    assert [path.name for path in (tmp_path / "mlflow").iterdir()] == ["writer.lock"]
