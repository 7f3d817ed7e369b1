"""Signs of life, wherever the run folder is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.observe import alive


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory://{}"])
def test_who_sees_to_a_job_shows_it_wherever_its_folder_is(tmp_path: Path, url: str) -> None:
    """``attach`` took a job with a remote folder for dead, while a keeper started its launcher."""
    run_url = url.format(tmp_path if "memory" not in url else uuid.uuid4().hex)
    assert alive.last_sign(run_url) is None
    alive.show(run_url)
    sign = alive.last_sign(run_url)
    assert sign is not None
    assert (sign.pid, sign.in_charge, sign.gone) == (os.getpid(), False, False)


@pytest.mark.parametrize(
    "what", [{"at_s": 1e400}, {"at_s": 1e20}, {"at_s": -1e20}, {"pid": 10**30}, {"pid": -1}]
)
def test_a_sign_that_nobody_can_have_left_is_none(tmp_path: Path, what: dict[str, Any]) -> None:
    """Who attached, or wanted to stop, ended in a traceback."""
    alive.show(str(tmp_path))
    sign = json.loads((tmp_path / alive.NAME).read_text())
    (tmp_path / alive.NAME).write_text(json.dumps(sign | what))
    assert alive.last_sign(str(tmp_path)) is None
    assert alive.seems_dead(str(tmp_path)) == ""


def test_who_has_never_made_a_sign_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that dies between its claim and its first sign."""
    now_s = 1000.0
    monkeypatch.setattr(alive.time, "monotonic", lambda: now_s)
    vigil = alive.Vigil(str(tmp_path))
    now_s += alive.AWAY_S
    assert vigil.look() == ""
    now_s += alive.EVERY_S
    assert vigil.look().startswith("no controller has made a sign of life for 601 s")
    alive.show(str(tmp_path))  # it was late
    now_s += alive.EVERY_S
    assert vigil.look() == ""


def test_where_another_controller_follows_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray it takes 5 to 10 s, with no sign before its own: who was attached was told after 3
    that no controller is alive, and ``stop`` that nothing is to be stopped; the job went on."""
    now_s = 1000.0
    monkeypatch.setattr(alive.time, "monotonic", lambda: now_s)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(alive.os, "getpid", lambda: ended.pid)
    alive.leave_sign(tmp_path, in_charge=True, followed=True, within_s=60.0)
    vigil = alive.Vigil(str(tmp_path))
    assert vigil.look() == alive.seems_dead(str(tmp_path)) == ""
    now_s += 59.0
    assert vigil.look() == ""
    now_s += 2.0
    assert vigil.look().startswith("no controller is alive")


@pytest.mark.parametrize("age_s", [61.0, 1e6])
def test_of_a_job_that_is_long_dead_nobody_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(alive.time, "monotonic", lambda: now_s)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sign = {"at_s": time.time() - age_s, "host": os.uname().nodename, "pid": ended.pid}
    (tmp_path / alive.NAME).write_text(json.dumps(sign | {"followed": True, "within_s": 60.0}))
    assert alive.seems_dead(str(tmp_path)).startswith("no controller is alive")
    vigil = alive.Vigil(str(tmp_path))
    assert vigil.look() == "", "it may be renewed"
    now_s += alive.GONE_S + 0.1
    assert vigil.look().startswith("no controller is alive")
