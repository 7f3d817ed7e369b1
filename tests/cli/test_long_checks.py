"""Who waits for a check is told that it goes on, and of what; and what has ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.cli import progress
from elastic_ft.cli.progress import saying_if_long


def test_what_takes_long_is_told_again_and_again_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    told_thrice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            told_thrice.set()

    monkeypatch.setattr(progress, "say", say)
    with saying_if_long("model.path own:make", first_s=0.05):
        assert told_thrice.wait(60), said
    assert said[:3] == [f"model.path own:make: {s} s so far" for s in ("0.05", "0.1", "0.2")]


def test_what_is_over_soon_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    before = {thread.ident for thread in threading.enumerate()}
    with saying_if_long("model.path own:make", first_s=60.0):
        pass
    for thread in threading.enumerate():
        if thread.ident not in before:
            thread.join(60)  # it does not wait for its time
            assert not thread.is_alive()
    assert said == []


def test_a_model_that_breaks_down_is_named_with_the_line_that_does(
    write_job: Callable[..., str], folder: Path
) -> None:
    """``elastic-ft check`` ended with 139, and said nothing."""
    (folder / "broken.py").write_text(
        "import ctypes\n\ndef make(**kwargs):\n    return ctypes.string_at(0)\n"
    )
    job = write_job({"model": {"path": "broken:make"}})
    command = [sys.executable, "-m", "elastic_ft", "check", job, "--processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault\n"), done.stderr
    assert f'File "{folder}/broken.py", line 4 in make\n' in done.stderr
