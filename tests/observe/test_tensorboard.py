"""Committed steps for TensorBoard: each once, as its reader sees it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import COMPLETED, run_command
from elastic_ft.errors import UsageError

tensorboardX = pytest.importorskip("tensorboardX", reason="the extra [tensorboard]")

from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: E402

from elastic_ft.observe.tensorboard import TensorBoardLog  # noqa: E402


def line(step: int, generation: int = 1) -> dict[str, Any]:
    logged = {"accuracy": step / 10, "note": "text"}
    values = {"step": step, "generation": generation, "loss": step + generation / 10}
    return (
        values
        | {"layout": "ddp2", "samples": 8 * step, "logged": logged}
        | {"metrics": {"accuracy": step / 20}}
    )


def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard has it: files in order; a session's start voids what is at its step or later.

    Records are (length, its checksum, an Event, its checksum).
    """
    found: list[tuple[int, float]] = []
    for path in sorted(folder.glob("events.*")):
        raw, at = path.read_bytes(), 0
        while at + 12 <= len(raw):
            (length,) = struct.unpack_from("<Q", raw, at)
            event = Event.FromString(raw[at + 12 : at + 12 + length])
            at += length + 16
            if event.session_log.status == SessionLog.START:
                found = [(step, value) for step, value in found if step < event.step]
            for value in event.summary.value:
                if value.tag == tag:
                    found.append((event.step, round(value.simple_value, 4)))
    return found


def test_each_step_is_shown_once_through_kills_and_what_was_trained_again(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    assert log.write(line(s) for s in range(1, 5)) == 4
    assert log.write(line(s) for s in range(1, 7)) == 2, "a file that was replaced is read again"
    cursor = (tmp_path / "cursor.json").read_text()
    log.write([line(7), line(8)])
    log.close()
    (tmp_path / "cursor.json").write_text(cursor)  # killed before it could say how far it was
    log = TensorBoardLog(tmp_path)
    log.write(line(s) for s in range(1, 10))
    log.write([line(s) for s in range(1, 6)] + [line(s, generation=2) for s in range(6, 12)])
    log.close()
    wanted = [(s, s + 0.1) for s in range(1, 6)] + [(s, s + 0.2) for s in range(6, 12)]
    assert shown(tmp_path, "loss") == wanted
    assert shown(tmp_path, "metrics/accuracy") == [(s, s / 20) for s in range(1, 12)]
    assert shown(tmp_path, "logged/accuracy") == [(s, s / 10) for s in range(1, 12)]
    assert shown(tmp_path, "samples") == shown(tmp_path, "logged/note") == []


def test_there_is_one_writer(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    with pytest.raises(UsageError, match="another process writes to"):
        TensorBoardLog(tmp_path)
    log.close()


def test_the_command_goes_on_where_it_was(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "events.jsonl").write_text("")
    for last in (3, 5):
        lines = "".join(json.dumps(line(s)) + "\n" for s in range(1, last + 1))
        (tmp_path / "steps.jsonl").write_text(lines)
        assert run_command(["tensorboard", str(tmp_path)]) == COMPLETED
        assert f"up to step {last}" in capsys.readouterr().out
    assert shown(tmp_path / "tensorboard", "loss") == [(s, s + 0.1) for s in range(1, 6)]
